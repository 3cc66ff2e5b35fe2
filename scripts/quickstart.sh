#!/bin/bash
# From nothing to a trained model: builds ling, learns a vocabulary from a bilingual text, makes token files, trains
# configs/quickstart.yaml, evaluates, draws, and lets the model write. Run it again and it goes on where it stopped.
# With --text it ends when the token files are there.
set -euo pipefail
cd "$(dirname "$0")/.."
data=build/data
run=runs/quickstart
mkdir -p "$data"

# With all cores, unless a make above says how many. Compiling prints nothing: a line says what takes the time.
build=(make -s --no-print-directory ling)
case ${MAKEFLAGS:-} in *-j*) ;; *) build+=("-j$(nproc)") ;; esac
"${build[@]}" -q >/dev/null 2>&1 || echo "building ling: a minute on two cores"
"${build[@]}"

# The Debian Reference in English and Chinese, from its two packages; the last twentieth of each is kept for validation.
if [ ! -f "$data/text.ready" ]; then
	rm -rf "$data/packages" && mkdir -p "$data/packages"
	fetch='apt-get download -q debian-reference-en debian-reference-zh-cn'
	(cd "$data/packages" && { $fetch || { { apt-get update -q || sudo apt-get update -q; } && $fetch; }; }) >"$data/fetch.log" 2>&1 || true
	for package in "$data"/packages/*.deb; do
		[ -f "$package" ] && dpkg-deb -x "$package" "$data/packages"
	done
	texts=()
	for language in en zh-cn; do
		text=$data/packages/usr/share/debian-reference/debian-reference.$language.txt.gz
		[ -f "$text" ] && gzip -dc "$text" >"$data/$language.txt" && texts+=("$data/$language.txt")
	done
	if [ ${#texts[@]} -lt 2 ]; then
		echo "The Debian Reference could not be fetched (see $data/fetch.log): training on this project's own documents and sources."
		cat README.md docs/*.md ./*.[ch] files/*.[ch] commands/*.[ch] tests/*.c scripts/* >"$data/project.txt"
		texts=("$data/project.txt")
	fi
	rm -f "$data"/*.train.txt "$data"/*.valid.txt
	for text in "${texts[@]}"; do
		lines=$(wc -l <"$text")
		head -n $((lines * 19 / 20)) "$text" >"${text%.txt}.train.txt"
		tail -n +$((lines * 19 / 20 + 1)) "$text" >"${text%.txt}.valid.txt"
	done
	vocabulary=$(sed -n 's/^  vocab_size: *//p' configs/quickstart.yaml)
	./ling train-tokenizer --vocab-size "$vocabulary" --out "$data/tokenizer.json" "$data"/*.train.txt
	./ling tokenize --tokenizer "$data/tokenizer.json" --out "$data/train" "$data"/*.train.txt
	./ling tokenize --tokenizer "$data/tokenizer.json" --out "$data/valid" "$data"/*.valid.txt
	touch "$data/text.ready"
fi
[ "${1:-}" != --text ] || exit 0

./ling info configs/quickstart.yaml
./ling train configs/quickstart.yaml

checkpoint=$run/$(printf 'step-%07d' "$(sed -n 's/^  steps: *//p' configs/quickstart.yaml)")
[ -d "$checkpoint" ] || exit 0 # stopped before its end, as ling has said
echo
echo "Validation text, bits per byte:"
./ling eval "$checkpoint" --data "$data/valid" --seq-len 256 --json >"$run/eval.json"
ling=$(sed 's/.*"bits_per_byte": \([0-9.]*\).*/\1/' "$run/eval.json")
bytes=$(cat "$data"/*.valid.txt | wc -c)
packed=$(cat "$data"/*.valid.txt | gzip -9 | wc -c)
awk -v ling="$ling" -v bytes="$bytes" -v packed="$packed" 'BEGIN { printf "  ling     %.3f\n  gzip -9  %.3f\n", ling, 8 * packed / bytes }'
./ling plot "$run" >/dev/null
echo
echo "The model goes on from a beginning, in English and in Chinese:"
for beginning in "This package is" "系统"; do
	echo
	printf '%s' "$beginning"
	./ling generate "$checkpoint" --prompt "$beginning" --max-tokens 60 --temperature 0.5 --top-p 0.9
done
echo
echo "checkpoint   $checkpoint"
echo "metrics      $run/metrics.jsonl"
echo "picture      $run/metrics.png"
