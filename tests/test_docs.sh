#!/bin/bash
# The documents against the sources: links, names of files, functions, keys and options, and the table of files in README.md.
. "$(dirname "$0")/check.sh"
cd "$root" || exit 1
documents=(README.md CONTRIBUTING.md CHANGELOG.md docs/*.md)
sources=(./*.c ./*.h files/*.[ch] model/*.[ch] training/*.[ch] commands/*.[ch])

# Every link names a file that is there, and a heading of it if there is a '#'.
test_links() {
	local document target file anchor
	for document in "${documents[@]}"; do
		while read -r target; do
			file=${target%%#*}
			[[ $target == *#* ]] && anchor=${target#*#} || anchor=
			[[ $target == http* ]] && continue
			[ -z "$file" ] && file=$document || file=$(dirname "$document")/$file
			[ -e "$file" ] || problem "$document links to $target"
			# A heading's anchor: small letters, spaces as '-', without punctuation.
			[ -z "$anchor" ] || sed -n 's/^##* //p' "$file" | tr 'A-Z ' 'a-z-' | tr -d '`.,:?'"'" | grep -qx -- "$anchor" ||
				problem "$document links to $target: no such heading"
		done < <(grep -o '](\([^)]*\))' "$document" | sed 's/](//; s/)$//')
	done
}

# Every name of a source file, script, config, test or document is that of a file.
test_files() {
	local document file
	for document in "${documents[@]}"; do
		while read -r file; do
			[ -e "$file" ] || [ -e "docs/$file" ] || [ -e "scripts/$file" ] || [[ $file == llm.c || $file == *NAME* ]] || problem "$document names $file"
		done < <(grep -oE '\b((docs|tests|scripts|configs|files|model|training|commands)/)?[A-Za-z0-9_-]+\.([ch]|sh|md|py)\b|\b(docs|tests|scripts|configs|files|model|training|commands)/[a-z0-9_./-]*[a-z0-9]\b' \
			"$document" | sort -u)
	done
}

# Every `name_with_underscores` is a word of the sources (or Hugging Face's), every `section.key` a key of a config.
test_names() {
	local document name
	./ling train --keys >"$folder/keys.txt" && ./ling eval --keys >>"$folder/keys.txt" || problem "no keys"
	for document in "${documents[@]}"; do
		while read -r name; do
			grep -qswF -- "$name" "${sources[@]}" scripts/* configs/* || [ "$name" = trust_remote_code ] || problem "$document: \`$name\` is not in the sources"
		done < <(sed '/^## Coming from lm-evaluation-harness/,$d' "$document" | grep -oE '`[a-z0-9]+(_[a-z0-9]+)+`' | tr -d '`' | sort -u)
		while read -r name; do
			grep -qE "^ *$name[ .]" "$folder/keys.txt" || problem "$document: \`$name\` is no key of a config"
		done < <(grep -oE '\b(model|data|train|optimizer|schedule|checkpoint|eval|log|parallel)\.[a-z]+[a-z0-9_.]*\b' "$document" |
			grep -vE '\.(c|h|md|txt|bin|idx|yaml|jsonl?|safetensors)$|^model\.(layers|word_embeddings|named_parameters)\b' | sort -u)
	done
}

# Every command that is shown exists, and so does every option of it.
test_commands() {
	local document line command option
	for document in "${documents[@]}"; do
		while read -r line; do
			command=$(sed -E 's/^[^a-z]*ling ([a-z-]+).*/\1/' <<<"$line")
			./ling "$command" --help >"$folder/help.txt" 2>&1 || problem "$document: ling $command"
			for option in $(grep -oE -- ' --[a-z-]+' <<<"${line#*ling "$command"}"); do
				grep -qE -- "$option\b" "$folder/help.txt" || problem "$document: ling $command has no $option"
			done
		done < <(sed -e ':more' -e '/\\$/{N;s/\\\n//;b more' -e '}' "$document" | grep -oE '(^    |`|\./)ling [a-z][a-z-]+ [^`#|]*')
	done
}

# In the table of docs/moe.md every function is defined in the file beside it; the lines that the exercise changes are in kernels.c.
test_moe_table() {
	local name file n=0 line
	while read -r name file; do
		grep -qE "^[a-z].*\b$name\(" "$file" || problem "docs/moe.md: $name is not defined in $file"
		n=$((n + 1))
	done < <(sed -n 's/^|.*| `\([a-z_0-9]*\)` | \([a-z./]*\) |$/\1 \2/p' docs/moe.md)
	[ $n -ge 20 ] || problem "docs/moe.md: only $n rows in the table of functions"
	n=0
	while read -r line; do
		grep -qF -- "$line" kernels.c || problem "docs/moe.md: kernels.c has no '$line'"
		n=$((n + 1))
	done < <(sed -n '/^## An exercise/,$ { s/^    //p; s/.*change `\([^`]*\)`.*/\1/p; s/.*Change `\([^`]*\)`.*/\1/p }' docs/moe.md)
	[ $n -eq 4 ] || problem "docs/moe.md: $n lines to change in the exercise"
}

# The table of README.md names every source file, with its lines to within a third, or 50.
test_file_table() {
	local file said lines
	for file in *.c files/*.c model/*.c training/*.c commands/*.c; do
		said=$(sed -n "s#^| ${file//./\\.} | \([0-9]*\) |.*#\1#p" README.md)
		lines=$(wc -l <"$file")
		if [ -z "$said" ]; then
			problem "README.md: the table of files lacks $file, $lines lines"
		elif [ $((lines - said)) -gt $((said / 3 + 50)) ] || [ $((said - lines)) -gt $((said / 3 + 50)) ]; then
			problem "README.md: $file has $lines lines, not $said"
		fi
	done
	for file in *.h files/*.h model/*.h training/*.h commands/*.h; do
		[ -e "${file%h}c" ] || grep -q "^| $file " README.md || problem "README.md: the table of files lacks $file"
	done
}

# The output that is shown below a `./ling info` command is that of the command.
test_info_blocks() {
	local document line command variables n=0
	for document in "${documents[@]}"; do
		command=
		while IFS= read -r line; do
			if [[ $line == "    "*"./ling info configs/"* ]]; then
				command=${line#*./ling info } variables=${line%./ling info *}
				# shellcheck disable=SC2086 # words are meant to split
				env $variables ./ling info $command >"$folder/info.txt" 2>&1 || problem "$document: ling info $command"
			elif [[ $line != '    '* && -n $line ]]; then
				command=
			elif [[ -n $command && -n $line && $line != *...* ]]; then
				grep -qxF -- "${line#    }" "$folder/info.txt" || problem "$document: ling info $command does not print '${line#    }'"
				n=$((n + 1))
			fi
		done <"$document"
	done
	[ $n -ge 40 ] || problem "only $n lines of ling info in the documents"
}

# info CONFIG [KEY=VALUE...] FILTER: a number from the report of `ling info`.
info() { ./ling info "${@:1:$#-1}" --json | jq -r "${!#}"; }
# rounded DIGITS NUMBER: with that many digits, such as 8.41.
rounded() { LC_ALL=C printf "%#.$1g" "$2" | sed "s/\\.\$//"; }
# says DOCUMENT TEXT: the words are there, whatever the ends of lines.
says() { tr -s ' \n' ' ' <"$1" | grep -qF -- "$2" || problem "$1 does not say: $2"; }
millions() { rounded "$1" "$(awk -v x="$2" 'BEGIN { print x / 1e6 }')"; }

# Numbers in sentences and tables that a quick command prints.
test_numbers() {
	local config q=configs/quickstart.yaml b=configs/bench.yaml row command rows=0 total active part
	total=$(info $q .parameters) active=$(info $q .active_parameters)
	says README.md "$(millions 2 "$total") million parameters, of which $(millions 2 "$active") million are active for a token"
	says README.md "Ling-Lite's $(rounded 3 "$(info configs/ling-lite.yaml '.parameters / 1e9')") billion parameters"
	says README.md "Ling-mini-2.0's $(rounded 3 "$(info configs/ling-mini-2.0.yaml '.parameters / 1e9')") billion"
	for config in ling-lite ling-plus ling-plus-first-upload ling-mini-2.0 ling-flash-2.0 ling-1t; do
		total=$(info configs/$config.yaml .parameters | sed ':a; s/\B[0-9]\{3\}\>/,&/; ta')
		grep -qF "$total parameters" configs/$config.yaml || problem "configs/$config.yaml does not say $total parameters"
	done
	says docs/performance.md "reads the $(millions 3 "$(info $b .parameters)") million weights twice"
	says docs/performance.md "256 experts have $(millions 3 "$(info $b model.num_experts=256 .parameters)") million parameters"
	for config in $q $b; do
		part=$(millions 2 "$(info $config '.active_parameters - .parts.embedding.active')")
		says docs/performance.md "| $config | $part million |"
	done
	for part in none attention layer; do
		says docs/performance.md "| \`$part\` | $(rounded 3 "$(info $b train.recompute=$part '.memory_bytes.activations / 1e9')") GB |"
	done
	says docs/performance.md "and $(rounded 3 "$(info $b '.memory_bytes.total / 1e9')") GB; with \`layer\`"
	says docs/generation.md "$((8 * $(sed -n 's/^  num_hidden_layers: //p; s/^  num_key_value_heads: /* /p; s/^  head_dim: /* /p' configs/ling-lite.yaml | tr '\n' ' ') / 1000 + 1)) kB for Ling-Lite"
	while IFS= read -r row; do
		command=$(sed 's/^| `\.\/ling info \([^`]*\)`.*/\1/' <<<"$row")
		# shellcheck disable=SC2086 # words are meant to split
		active="| $(millions 3 "$(info $command .parameters)") million | $(millions 3 "$(info $command .active_parameters)") million | $(
			info $command .memory_bytes.total | awk '{ printf "%.2f", $1 / 1e9 }') GB | $(info $command .flops_per_token | awk '{ printf "%.2e", $1 }') |"
		[[ $row == *"$active" ]] || problem "docs/first-hours.md: $command: expected $active"
		rows=$((rows + 1))
	done < <(grep '^| `\./ling info' docs/first-hours.md)
	[ $rows -ge 3 ] || problem "docs/first-hours.md: only $rows models"
	says docs/first-hours.md "has $(wc -l <configs/chat.jsonl) short conversations"
}

check links files names commands moe_table file_table info_blocks numbers
finish
