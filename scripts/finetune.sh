#!/bin/bash
# Fine-tunes the quickstart's model on the conversations of configs/chat.jsonl, as configs/finetune.yaml says, and asks it each of their
# first questions. Fails unless nine of ten replies are those of the conversations. Run it after `make quickstart`; a few minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
make -s ling
if [ ! -d runs/quickstart/step-0000450 ]; then
	echo "runs/quickstart/step-0000450 is not there: run make quickstart first" >&2
	exit 1
fi

./ling tokenize --tokenizer build/data/tokenizer.json --out build/data/chat configs/chat.jsonl
./ling train configs/finetune.yaml

# A line is {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}, ...]}, without a \ in the texts.
exchange='^{"messages": \[{"role": "user", "content": "\([^"]*\)"}, {"role": "assistant", "content": "\([^"]*\)"}.*'
sed "s/$exchange/\1/" configs/chat.jsonl >build/data/questions.txt
sed "s/$exchange/\2/" configs/chat.jsonl >build/data/answers.txt
./ling generate runs/finetune --chat --prompts build/data/questions.txt --max-tokens 60 --json |
	sed 's/.*"text": "\([^"]*\)".*/\1/' >build/data/replies.txt
echo
paste -d '\n' build/data/questions.txt build/data/replies.txt | sed 's/^/  /; n; s/^/      /'
right=$(paste -d '|' build/data/replies.txt build/data/answers.txt | awk -F '|' '$1 == $2 { n++ } END { print n + 0 }')
all=$(wc -l <build/data/answers.txt)
echo "$right of $all replies are those of configs/chat.jsonl."
[ $((10 * right)) -ge $((9 * all)) ]
