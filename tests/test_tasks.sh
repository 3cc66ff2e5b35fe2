#!/bin/bash
# `ling eval --tasks` as its user meets it, built with sanitizers: results and samples, errors, batches, ranks.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1

# ---- a model of a few steps, and a task of each type ----
head -c 3000 "$root/README.md" >text.txt
tiny model.initializer_range=0.2 model.max_position_embeddings=64 train.seed=1 train.micro_batch=4 train.batch=4
model=run/step-0000020
cat >all.yaml <<'END'
- name: choice
  type: multiple_choice
  data: choice.jsonl
  prompt: "{q} is"
  options: o
  option: " {option}"
  answer: a
  examples: { count: 1, seed: 5 }
  separator: ". "
- name: talk
  type: multiple_choice
  data: choice.jsonl
  prompt: "What is {q}?"
  options: o
  answer: a
  chat: true
- { name: text, type: perplexity, data: text.jsonl, text: "{body}" }
- { name: words, type: exact_match, data: bpe.jsonl, prompt: "{q}", answer: a, max_tokens: 9, stop: "e",
    extract: "(\\w)" }
END
cat >choice.jsonl <<'END'
{"q": "sky", "o": ["blue", "green", "as high as it is wide and deep"], "a": 0}
{"q": "grass", "o": ["green", "green"], "a": 1}
{"q": "night", "o": ["black", "blue"], "a": 0}
END
printf '{"body": "the model and the trainer"}\n{"body": "%0100d"}\n' 7 >text.jsonl
printf '{"q": "the ", "a": ["e", "x"]}\n{"q": "", "a": "y"}\n{"q": "%0100d", "a": 3}\n' 1 >bpe.jsonl

test_results() {
	expect 0 "" "$ling" tokenize --out text text.txt
	expect 0 "" "$ling" train tiny.yaml
	expect 0 "" "$ling" eval $model --tasks all.yaml --out results
	has out.txt "choice " "multiple choice" "accuracy_tokens" "perplexity" "bits_per_byte" "exact match" \
		"documents in several windows: 1" "contexts cut from the left to fit into the window: 1"
	[ "$(ls results | tr '\n' ' ')" = "results.json samples.jsonl " ] || problem "results: $(ls results)"
	[ "$(wc -l <results/samples.jsonl)" = 11 ] || problem "samples: $(wc -l <results/samples.jsonl)"
	has results/results.json '"name": "choice"' '"type": "multiple_choice"' '"samples": 3' '"accuracy_bytes"' \
		'"standard_error"' '"ties"' '"log_likelihood": 1' '"contexts_cut": 1' '"documents_in_several_windows": 1' \
		'"token_perplexity"' '"word_perplexity"' '"byte_perplexity"' '"exact_match"' \
		'"seq_len": 64' '"tokenizer_hash"'
	has results/samples.jsonl '"task":"choice","line":1,"prompt":"sky is","context_cut":false' \
		'{"text":" blue","log_likelihood":-' '"bytes":5,"tokens":[32,98,108,117,101]' \
		'"prediction":{"log_likelihood":' '"correct":{"log_likelihood":' \
		'"task":"text","line":2' '"several_windows":true' '"answers":["e","x"],"reply":"'
	# in chat form an option has no space before it
	has results/samples.jsonl '"task":"talk","line":2,"prompt":"What is grass?","context_cut":false,'\
'"options":[{"text":"green"'
	expect 0 "" "$ling" eval $model --tasks all.yaml --json
	[ "$(tr -d ' \n' <out.txt)" = "$(tr -d ' \n' <results/results.json)" ] || problem "--json: $(cat out.txt)"
	# the same again, in place of the old
	expect 0 "" "$ling" eval $model --tasks all.yaml --out results --batch 2 --tokenizer byte
	expect 0 "" "$ling" eval $model --tasks all.yaml --out one --batch 1
	for file in results.json samples.jsonl; do
		cmp results/$file one/$file || problem "batches of 1 and 2 give other $file"
	done
}

test_ranks() {
	local n file
	for n in 2 3; do
		ranks $n "$root/ling" eval $model --tasks all.yaml --out ranks$n >out.txt 2>err.txt ||
			problem "$n ranks: $(cat err.txt)"
		"$root/ling" eval $model --tasks all.yaml --out alone >alone.txt 2>err.txt
		for file in results.json samples.jsonl; do
			cmp ranks$n/$file alone/$file || problem "$n ranks give other $file"
		done
		cmp out.txt alone.txt || problem "$n ranks print something else"
	done
	ranks 2 "$root/ling" eval $model --tasks none.yaml >out.txt 2>err.txt && problem "no tasks, no error"
	[ "$(grep -c '^ling' err.txt)" = 1 ] || problem "expected one error line: $(cat err.txt)"
	# What a single rank finds is told once, with its name, and no result is begun.
	# shellcheck disable=SC2016 # the shell of each rank expands it
	ranks 2 bash -c '[ $OMPI_COMM_WORLD_RANK = 0 ] || tasks=none.yaml; exec "$0" eval "$1" --tasks "${tasks:-all.yaml}" --out begun' \
		"$root/ling" $model >out.txt 2>err.txt && problem "no tasks on rank 1, no error"
	grep '^ling: rank 1 on [^ ]*: none.yaml: ' err.txt >/dev/null || problem "not rank 1's error: $(cat err.txt)"
	[ "$(grep -c '^ling' err.txt)" = 1 ] || problem "expected one error line: $(cat err.txt)"
	[ ! -e begun ] || problem "results were begun"
}

# Paths that are not UTF-8, as a disk may hold: the results are written, and are JSON.
test_foreign_paths() {
	local odd=$'odd\xe9\xff' file
	rm -rf "$odd" && mkdir "$odd" && cp ./*.jsonl all.yaml "$odd" && cp -r $model "$odd/model"
	expect 0 "" "$ling" eval "$odd/model" --tasks "$odd/all.yaml" --out "$odd/results"
	for file in results.json samples.jsonl; do
		[ -s "$odd/results/$file" ] || problem "$file: $(ls "$odd")"
	done
	jq -e '.model == "odd\ufffd\ufffd/model" and .tasks[0].data == "odd\ufffd\ufffd/choice.jsonl"' "$odd/results/results.json" >/dev/null ||
		problem "results.json: $(head -c 400 "$odd/results/results.json")"
	cmp -s "$odd/results/samples.jsonl" results/samples.jsonl || problem "the path changes the samples"
	expect 0 "" "$ling" eval "$odd/model" --tasks "$odd/all.yaml" --json
	json out.txt
}

# A model with a vocabulary of its own: tokens are those of its tokenizer.json, and options have fewer.
test_vocabulary() {
	expect 0 "" "$ling" train-tokenizer --vocab-size 300 --out bpe.json text.txt
	expect 0 "" "$ling" tokenize --tokenizer bpe.json --out words text.txt
	expect 0 "" "$ling" train tiny.yaml data.train=words data.tokenizer=bpe.json model.vocab_size=320 \
		train.output_dir=words train.steps=3
	expect 0 "" "$ling" eval words/step-0000003 --tasks all.yaml --out words/results
	has words/results/samples.jsonl '{"text":" blue","log_likelihood":-' '"bytes":5,"tokens":['
	[ "$(grep -c . words/results/samples.jsonl)" = 11 ] || problem "samples: $(cat words/results/samples.jsonl)"
	for file in results words/results; do
		grep -o '"tokens":[^]]*]' $file/samples.jsonl >$file/tokens.txt
	done
	! cmp -s results/tokens.txt words/results/tokens.txt || problem "the same tokens"
	expect 1 "vocab_size" "$ling" eval $model --tasks all.yaml --tokenizer bpe.json
}

# A window in which five examples of bytes fit.
test_long_window() {
	expect 0 "" "$ling" train tiny.yaml model.max_position_embeddings=2048 train.output_dir=chars train.steps=3
}

test_bad_use() {
	expect 2 "exclude each other" "$ling" eval $model --tasks all.yaml --data text --seq-len 16
	expect 2 "--data is required, or --tasks" "$ling" eval $model
	expect 2 "--max-windows" "$ling" eval $model --tasks all.yaml --max-windows 3
	expect 2 "go with --tasks" "$ling" eval $model --data text --seq-len 16 --batch 3
	expect 2 "--batch" "$ling" eval $model --tasks all.yaml --batch 0
	expect 1 "max_position_embeddings" "$ling" eval $model --tasks all.yaml --seq-len 65
	expect 1 "none.yaml" "$ling" eval $model --tasks none.yaml
	expect 1 "nothere" "$ling" eval nothere --tasks all.yaml
	expect 0 "" "$ling" eval --keys
	has out.txt "examples.count" "multiple_choice" "required"
	expect 0 "" "$ling" eval $model --data text --seq-len 16 --json
}

test_bad_tasks() {
	sed 's/answer: a/anser: a/' all.yaml >bad.yaml
	expect 1 "bad.yaml:7: unknown key anser; did you mean answer?" "$ling" eval $model --tasks bad.yaml
	expect 1 "choice.jsonl:1: task choice: its options need 31 tokens" \
		"$ling" eval $model --tasks all.yaml --seq-len 30
	sed 's/"o": \["black", "blue"\]/"o": 3/' choice.jsonl >bad.jsonl
	sed 's/choice.jsonl/bad.jsonl/' all.yaml >bad.yaml
	expect 1 'bad.jsonl:3: the field `o` is an integer' "$ling" eval $model --tasks bad.yaml --out untouched
	[ ! -e untouched ] || problem "untouched was made"
	mkdir -p old && echo old >old/results.json
	expect 1 "old" "$ling" eval $model --tasks all.yaml --out old/results.json
	# no space: what was there stays, and nothing half
	(ulimit -f 1 && trap '' XFSZ && exec "$ling" eval $model --tasks all.yaml --out old >out.txt 2>err.txt)
	[ $? = 1 ] || problem "a full disk was not noticed: $(cat err.txt)"
	has err.txt "cannot write"
	[ "$(cat old/results.json)" = old ] && [ "$(ls old)" = results.json ] || problem "old: $(ls old)"
}

# Tiny files in the form in which each benchmark is published, and the task files of configs/tasks, with the lines that make their samples.
test_ready_tasks() {
	local file name
	rm -rf ready && mkdir -p ready/configs/tasks ready/scripts && cp "$root"/configs/tasks/*.yaml ready/configs/tasks
	cp "$root/scripts/csv-to-jsonl" ready/scripts && cd ready || return
	mkdir -p grade-school-math/grade_school_math/data ARC-V1-Feb2018-2/ARC-{Easy,Challenge} data/{dev,test} dev val BIG-Bench-Hard/bbh AGIEval/data/v1
	for file in train test; do
		for name in 1 2 3 4 5 6; do
			printf '{"question": "%s+1?", "answer": "%s+1=<<%s+1=%s>>%s\\n#### 1,%s00"}\n' $name $name $name $((name + 1)) $((name + 1)) $name
		done >grade-school-math/grade_school_math/data/$file.jsonl
	done
	printf '%s\n' '{"ind": 24, "activity_label": "Roof", "ctx_a": "He [title] sits.", "ctx_b": "he", "ctx": "He [title] sits. he", "split": "val", "split_type": "indomain", "label": 3, "endings": ["[step] a b.", "c.", "d.", "e."], "source_id": "x"}' >hellaswag_val.jsonl
	for name in Easy Challenge; do
		printf '%s\n' '{"id":"a","question":{"stem":"Which?","choices":[{"text":"w","label":"A"},{"text":"iron","label":"B"}]},"answerKey":"B"}' \
			'{"id":"b","question":{"stem":"Wet?","choices":[{"text":"sand","label":"1"},{"text":"sea","label":"2"},{"text":"dust","label":"3"}]},"answerKey":"2"}' \
			>ARC-V1-Feb2018-2/ARC-$name/ARC-$name-Test.jsonl
	done
	for name in abstract_algebra world_religions; do
		printf '"Find ""x"",\nnow",0,4,"2,5",6,B\nQ2,a,b,c,d,A\nQ3,a,b,c,d,C\nQ4,a,b,c,d,D\nQ5,a,b,c,d,A\nQ6,a,b,c,d,A\n' | tee data/dev/${name}_dev.csv >data/test/${name}_test.csv
	done
	for name in computer_network law; do
		printf 'id,question,A,B,C,D,answer,explanation\r\n0,问____,1,2,3,4,C,"甲,乙"\r\n1,b,1,2,3,4,A,x\n2,c,1,2,3,4,A,x\n3,d,1,2,3,4,A,x\n4,e,1,2,3,4,A,x\n' >dev/${name}_dev.csv
		printf 'id,question,A,B,C,D,answer\n0,问题____,1,2,3,4,C\n' >val/${name}_val.csv
	done
	for name in boolean_expressions navigate; do
		printf '{"canary": "c", "examples": [{"input": "a\\nb", "target": "True"}, {"input": "b", "target": "False"}, {"input": "c", "target": "True"}, {"input": "d", "target": "True"}]}' >BIG-Bench-Hard/bbh/$name.json
	done
	printf '{"passage": "P.", "question": "Q", "options": ["(A)a", "(B)b", "(C)c", "(D)d", "(E)e"], "label": "E", "answer": null, "other": null}\n' >AGIEval/data/v1/lsat-ar.jsonl
	printf '{"passage": null, "question": "Q", "options": ["(A)a", "(B)b", "(C)c", "(D)d"], "label": "D", "answer": null, "other": null}\n' >AGIEval/data/v1/logiqa-en.jsonl
	for file in configs/tasks/*.yaml; do
		sed -n 's/^#     //p' "$file" >make.sh
		[ -s make.sh ] || problem "$file: no line that makes its samples"
		bash -eu make.sh 2>err.txt || problem "$file: $(cat err.txt)"
	done
	for file in configs/tasks/*.yaml; do
		name=$(basename "$file" .yaml)
		expect 0 "" "$ling" eval ../chars/step-0000003 --tasks "$file" --out "$name"
		[ ! -s err.txt ] || problem "$file: $(cat err.txt)"
	done
	[ "$(jq -c .answers gsm8k/samples.jsonl | head -n 1)" = '["1100"]' ] || problem "gsm8k: $(head -c 600 gsm8k/samples.jsonl)"
	has hellaswag/samples.jsonl '"prompt":"Roof: He. sits. he"' '"answer":3'
	[ "$(jq -c .answer arc/samples.jsonl | tr '\n' ' ')" = "1 1 1 1 " ] || problem "arc: $(cat arc/samples.jsonl)"
	jq -e '.groups[0] | .name == "arc" and .samples == 4 and (.tasks | length) == 2 and .scores.acc_norm.mean_of_tasks.value == .scores.acc_norm.mean_of_samples.value' arc/results.json >/dev/null ||
		problem "arc: $(cat arc/results.json)"
	has mmlu/samples.jsonl '"prompt":"Find \"x\",\nnow\nA. 0\nB. 4\nC. 2,5\nD. 6\nAnswer:"' '"context":"The following are multiple choice questions (with answers) about abstract algebra.\n\n'
	has mmlu-all/samples.jsonl 'about world religions.' '"task":"mmlu-world_religions"'
	has ceval/samples.jsonl '"prompt":"问题____\nA. 1' '"answer":2'
	has ceval-all/results.json '"ceval-law"'
	has bbh/samples.jsonl '"prompt":"Q: a\nb\nA:"' '"answers":["True"]'
	has bbh-all/results.json '"bbh-navigate"' '"mean_of_tasks"'
	has agieval/samples.jsonl '"prompt":"P.Q: Q Answer' '"prompt":"Q: Q Answer' '"answer":4'
	cd ..
}

# Groups: each task counts alike, or each sample. Skipped samples and examples from the task's own data are told.
test_groups() {
	local task
	printf '%s\n' '{"q": "a", "o": ["x", "y"], "a": 0}' >one.jsonl
	printf '%s\n' '{"q": "a", "o": ["x", "y"], "a": 1}' '{"q": "b", "o": ["x", "y"], "a": 1}' '{"q": null, "o": ["x", "y"], "a": 1}' \
		'{"q": "c", "o": ["x", "y"], "a": 0}' >three.jsonl
	for task in one three; do
		printf -- '- {name: %s, group: both, type: multiple_choice, data: %s.jsonl, prompt: "{q}", options: o, answer: a, on_null: skip}\n' $task $task
	done >groups.yaml
	expect 0 "" "$ling" eval $model --tasks groups.yaml --json
	jq -e '(.tasks[0].scores.accuracy.value) as $a | (.tasks[1].scores.accuracy.value) as $b | .groups[0].scores.accuracy as $g |
		.tasks[1].skipped == 1 and .groups[0].samples == 4 and ($g.mean_of_tasks.value - ($a + $b) / 2 | fabs) < 1e-12 and
		($g.mean_of_samples.value - ($a + 3 * $b) / 4 | fabs) < 1e-12 and $g.mean_of_tasks.standard_error == null' out.txt >/dev/null ||
		problem "groups: $(cat out.txt)"
	# the errors of tasks of 2 and 3 samples add up in squares
	for task in 2 3; do
		printf -- '- {name: of%s, group: pair, type: multiple_choice, data: three.jsonl, prompt: "{q}", options: o, answer: a, on_null: skip, limit: %s}\n' $task $task
	done >pair.yaml
	expect 0 "" "$ling" eval $model --tasks pair.yaml --json
	jq -e '[.tasks[].scores.accuracy.standard_error] as [$a, $b] | .groups[0].scores.accuracy as $g | $a + $b > 0 and
		($g.mean_of_tasks.standard_error - ($a * $a + $b * $b | sqrt) / 2 | fabs) < 1e-12 and
		($g.mean_of_samples.standard_error - (4 * $a * $a + 9 * $b * $b | sqrt) / 5 | fabs) < 1e-12' out.txt >/dev/null || problem "errors of groups: $(cat out.txt)"
	expect 0 "" "$ling" eval $model --tasks groups.yaml
	has out.txt "both  " "mean of tasks" "mean of samples" "samples skipped, as a field is null: 1"
	expect 0 "" "$ling" eval $model --tasks all.yaml
	has err.txt "note: task choice takes its examples from choice.jsonl"
	# what the model was given: the example, and in chat form the tags
	jq -se 'map(select(.task == "choice" and .line == 1)) | .[0].context | test("^(grass is green|night is black)[.] sky is$")' results/samples.jsonl >/dev/null ||
		problem "context: $(head -n 1 results/samples.jsonl)"
	has results/samples.jsonl '"context":"<role>HUMAN</role>What is grass?<role>ASSISTANT</role>"'
}

check results foreign_paths ranks groups vocabulary long_window ready_tasks bad_use bad_tasks
finish
