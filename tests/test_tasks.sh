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
	expect 2 "go with --tasks" "$ling" eval $model --data text --seq-len 16 --out there
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

# same WHAT FILE FILTER EXPECTED: what jq finds in the first line of a file of samples, as text, equals EXPECTED.
same() {
	local found
	found=$(head -n 1 "$2" | jq -r "$3"; echo .)
	[ "$found" = "$4"$'\n'. ] || problem "$1: found:"$'\n'"${found%?}expected:"$'\n'"$4"
}

# Tiny files in the form in which each benchmark is published, and the task files of configs/tasks, with the lines that make their samples. The
# texts that the model is given are those of lm-evaluation-harness.
test_ready_tasks() {
	local file name text
	rm -rf ready && mkdir -p ready/configs/tasks ready/scripts && cp "$root"/configs/tasks/*.yaml ready/configs/tasks
	cp "$root/scripts/csv-to-jsonl" ready/scripts && cd ready || return
	mkdir -p grade-school-math/grade_school_math/data ARC-V1-Feb2018-2/ARC-{Easy,Challenge} data/{dev,test} dev val BIG-Bench-Hard/{bbh,cot-prompts} AGIEval/data/v1
	for name in 1 2 3 4 5; do
		printf '{"question": "Ann has %s pears and finds one. How many has she?", "answer": "She has %s+1=<<%s+1=%s>>%s pears.\\n#### 1,%s00"}\n' $name $name $name $((name + 1)) $((name + 1)) $name
	done >grade-school-math/grade_school_math/data/train.jsonl
	echo '{"question": "How cold is it?", "answer": "It is -5.\n#### -5"}' >grade-school-math/grade_school_math/data/test.jsonl
	# the second of the contexts has no second part
	printf '%s\n' '{"ind": 24, "activity_label": "Roof repair", "ctx_a": "How to mend it [title] Look. [step] A man   sits.", "ctx_b": "then HE", "ctx": "How to mend it [title] Look. [step] A man   sits. then HE", "split": "val", "split_type": "indomain", "label": 3, "endings": [" is [substeps] up. ", "[step] a b.", "goes [title] Now.", "stays."], "source_id": "wikihow~1"}' \
		'{"ind": 25, "activity_label": "Sail", "ctx_a": "A boat.", "ctx_b": "", "ctx": "A boat.", "split": "val", "split_type": "zeroshot", "label": "1", "endings": ["b", "c", "d", "e"], "source_id": "activitynet~v"}' >hellaswag_val.jsonl
	for name in Easy Challenge; do
		printf '%s\n' '{"id":"a","question":{"stem":"Wet?","choices":[{"text":"sand","label":"1"},{"text":"sea","label":"2"},{"text":"dust","label":"3"},{"text":"air","label":"4"}]},"answerKey":"2"}' \
			'{"id":"b","question":{"stem":"Which?","choices":[{"text":"w","label":"A"},{"text":"iron","label":"B"}]},"answerKey":"B"}' \
			>ARC-V1-Feb2018-2/ARC-$name/ARC-$name-Test.jsonl
	done
	# questions that begin with a blank, without and with quotes
	for name in abstract_algebra world_religions; do
		printf '%s\n' ' Who?,a,"b,",c,d,A' '" Find ""x"" ",0,1,2,3,D' Q3,a,b,c,d,C Q4,a,b,c,d,D Q5,a,b,c,d,A Q6,a,b,c,d,A >data/dev/${name}_dev.csv
		printf '" Find ""y"",\nnow",0,4,"2,5",6,B\n' >data/test/${name}_test.csv
	done
	for name in computer_network law; do
		printf 'id,question,A,B,C,D,answer,explanation\r\n0,问____,1,2,3,4,C,"甲,乙"\r\n1,b,1,2,3,4,A,x\n2,c,1,2,3,4,A,x\n3,d,1,2,3,4,A,x\n4,e,1,2,3,4,A,x\n' >dev/${name}_dev.csv
		printf 'id,question,A,B,C,D,answer\n0,　问题____ ,1,2,3,4,D\n' >val/${name}_val.csv
	done
	printf '{\n\t"computer_network": [\n\t\t"Computer Network",\n\t\t"\\u8ba1\\u7b97\\u673a\\u7f51\\u7edc",\n\t\t"STEM"\n\t],\n\t"law": [\n\t\t"Law",\n\t\t"\\u6cd5\\u5b66"\n\t]\n}' >subject_mapping.json
	for name in boolean_expressions navigate; do
		printf '{"canary": "c", "examples": [{"input": "a\\nb", "target": "True"}, {"input": "c", "target": "False"}, {"input": "d", "target": "No"}, {"input": "e", "target": "False"}]}' >BIG-Bench-Hard/bbh/$name.json
		printf '%s\n' 'canary GUID' '-----' "Find out about $name." '' 'Q: not so: # is' "A: Let's think step by step." '  Well: "no". So the answer is False.' '' \
			'Q: so is' "A: Let's think step by step." 'So the answer is True.' >BIG-Bench-Hard/cot-prompts/$name.txt
	done
	printf '{"passage": "P.", "question": "Q", "options": ["(A)a", "(B)b", "(C)c", "(D)d", "(E)e"], "label": "E", "answer": null, "other": null}\n' >AGIEval/data/v1/lsat-ar.jsonl
	printf '{"passage": null, "question": "Q", "options": ["(A)a", "(B)b", "(C)c", "(D)d"], "label": "D", "answer": null, "other": null}\n' >AGIEval/data/v1/logiqa-en.jsonl
	printf '{"passage": null, "question": "何时？", "options": ["(A)一", "(B)二", "(C)三", "(D)四"], "label": "A", "other": {"source": "x"}}\n' >AGIEval/data/v1/gaokao-history.jsonl
	for file in configs/tasks/*.yaml; do
		sed -n 's/^#     //p' "$file" >make.sh
		[ -s make.sh ] || problem "$file: no line that makes its samples"
		bash -eu make.sh 2>err.txt || problem "$file: $(cat err.txt)"
	done
	# what Hugging Face publishes of ARC, HellaSwag and MMLU, as JSON lines, with the changes that the comments name
	mkdir hf
	echo '{"id": "a", "question": "Wet?", "choices": {"text": ["sand", "sea", "dust", "air"], "label": ["1", "2", "3", "4"]}, "answerKey": "2"}' >hf/arc.jsonl
	echo '{"question": " Find \"y\",\nnow", "subject": "abstract_algebra", "choices": ["0", "4", "2,5", "6"], "answer": 1}' >hf/mmlu.jsonl
	cat >hf-tasks.yaml <<-'END'
		- name: arc
		  type: multiple_choice
		  data: hf/arc.jsonl
		  prompt: "Question: {question}\nAnswer:"
		  options: choices.text
		  option: " {option}"
		  answer: answerKey
		  answer_form: label
		  labels: choices.label
		- name: mmlu
		  type: multiple_choice
		  data: hf/mmlu.jsonl
		  prompt: "{question.strip()}\nA. {choices.0}\nB. {choices.1}\nC. {choices.2}\nD. {choices.3}\nAnswer:"
		  options: [" A", " B", " C", " D"]
		  answer: answer
		  answer_form: index
	END
	for file in configs/tasks/*.yaml hf-tasks.yaml; do
		name=$(basename "$file" .yaml)
		expect 0 "" "$ling" eval ../chars/step-0000003 --tasks "$file" --out "$name"
		[ ! -s err.txt ] || problem "$file: $(cat err.txt)"
	done

	same gsm8k gsm8k/samples.jsonl .answers[0] "-5"
	# five examples, each once, in any order
	text=$(jq -r .context gsm8k/samples.jsonl)
	[ "$(sed '/^$/d' <<<"$text" | sort)" = "$(for name in 1 2 3 4 5; do
		printf 'Question: Ann has %s pears and finds one. How many has she?\nAnswer: She has %s+1=<<%s+1=%s>>%s pears.\n#### 1,%s00\n' $name $name $name $((name + 1)) $((name + 1)) $name
	done | { cat; printf 'Question: How cold is it?\nAnswer:\n'; } | sort)" ] || problem "gsm8k: $text"
	[[ $text == Question:*$'00\n\nQuestion: How cold is it?\nAnswer:' ]] || problem "gsm8k: $text"

	same hellaswag hellaswag/samples.jsonl .context "Roof repair: How to mend it. Look. A man  sits. Then he"
	same hellaswag hellaswag/samples.jsonl '[.options[].text] | tojson' '[" is up.","  a b."," goes. Now."," stays."]'
	same hellaswag hellaswag/samples.jsonl .answer 3
	same hellaswag <(sed 1d hellaswag/samples.jsonl) .context "Sail: A boat."
	same hellaswag <(sed 1d hellaswag/samples.jsonl) .answer 1

	for name in arc hf-tasks; do
		same $name $name/samples.jsonl .context $'Question: Wet?\nAnswer:'
		same $name $name/samples.jsonl '[.options[].text] | tojson' '[" sand"," sea"," dust"," air"]'
		same $name $name/samples.jsonl .answer 1
	done
	[ "$(jq -c .answer arc/samples.jsonl | tr '\n' ' ')" = "1 1 1 1 " ] || problem "arc: $(cat arc/samples.jsonl)"
	jq -e '.groups[0] | .name == "arc" and .samples == 4 and (.tasks | length) == 2 and .scores.acc_norm.mean_of_tasks.value == .scores.acc_norm.mean_of_samples.value' arc/results.json >/dev/null ||
		problem "arc: $(cat arc/results.json)"

	same mmlu mmlu/samples.jsonl .context 'The following are multiple choice questions (with answers) about abstract algebra.

Who?
A. a
B. b,
C. c
D. d
Answer: A

Find "x"
A. 0
B. 1
C. 2
D. 3
Answer: D

Q3
A. a
B. b
C. c
D. d
Answer: C

Q4
A. a
B. b
C. c
D. d
Answer: D

Q5
A. a
B. b
C. c
D. d
Answer: A

Find "y",
now
A. 0
B. 4
C. 2,5
D. 6
Answer:'
	same mmlu mmlu/samples.jsonl .answer 1
	same hf-mmlu <(sed 1d hf-tasks/samples.jsonl) '"\(.context) \(.answer)"' $'Find "y",\nnow\nA. 0\nB. 4\nC. 2,5\nD. 6\nAnswer: 1'
	has mmlu-all/samples.jsonl 'about world religions.' '"task":"mmlu-world_religions"'

	text=$'以下是中国关于法学的单项选择题，请选出其中的正确答案。\n\n'
	for name in "问____ C" "b A" "c A" "d A" "e A"; do
		text+="${name% *}"$'\nA. 1\nB. 2\nC. 3\nD. 4\n答案： '"${name#* }"$'\n\n'
	done
	text+=$'问题____\nA. 1\nB. 2\nC. 3\nD. 4\n答案：'
	same ceval ceval/samples.jsonl .context "${text/法学/计算机网络}"
	same ceval ceval/samples.jsonl '[.options[].text] | tojson' '[" A"," B"," C"," D"]'
	same ceval ceval/samples.jsonl .answer 3
	same ceval-all <(sed 1d ceval-all/samples.jsonl) .context "$text"
	has ceval-all/results.json '"ceval-law"'

	same bbh bbh/samples.jsonl \
		'.context | split("\n\n") | (.[:3] | sort) + .[3:] | tojson' '["Q: c\nA: False","Q: d\nA: No","Q: e\nA: False","Q: a\nb\nA:"]'
	same bbh bbh/samples.jsonl .answers[0] True
	has bbh-all/results.json '"bbh-navigate"' '"mean_of_tasks"'
	same bbh-cot bbh-cot/samples.jsonl .context 'Find out about boolean_expressions.

Q: not so: # is
A: Let'"'"'s think step by step.
  Well: "no". So the answer is False.

Q: so is
A: Let'"'"'s think step by step.
So the answer is True.

Q: a
b
A: Let'"'"'s think step by step.
'
	has bbh-cot/results.json '"bbh-cot-navigate"'

	same agieval agieval/samples.jsonl .context $'P.Q: Q Answer Choices: (A)a (B)b (C)c (D)d (E)e\nA: Among A through E, the answer is'
	same agieval agieval/samples.jsonl '[.options[].text] | tojson' '[" (A)a"," (B)b"," (C)c"," (D)d"," (E)e"]'
	same agieval agieval/samples.jsonl .answer 4
	same agieval <(sed 1d agieval/samples.jsonl) .context $'Q: Q Answer Choices: (A)a (B)b (C)c (D)d\nA: Among A through D, the answer is'
	same agieval <(sed 1,2d agieval/samples.jsonl) .context $'问题：何时？ 选项：(A)一 (B)二 (C)三 (D)四\n答案：从A到D, 我们应选择'
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
	printf '{"q": "%s?", "a": "%s"}\n' 1 one 2 two 3 three >match.jsonl
	echo '- {name: match, type: exact_match, data: match.jsonl, prompt: "{q}", answer: a, max_tokens: 1, examples: {count: 2, choose: first}}' >match.yaml
	expect 0 "" "$ling" eval $model --tasks match.yaml --out match
	[ "$(jq -r '.context | gsub("\n"; "/")' match/samples.jsonl | tail -n 1)" = "1?one//2?two//3?" ] || problem "context: $(cat match/samples.jsonl)"
}

check results foreign_paths ranks groups vocabulary long_window ready_tasks bad_use bad_tasks
finish
