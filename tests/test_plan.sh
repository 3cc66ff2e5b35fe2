#!/bin/bash
# What `ling info --ranks` predicts against what ranks measure: bytes sent by kind, and peak memory. Also the launcher, and the warning of
# more threads than cores.
. "$(dirname "$0")/check.sh"
ling=$root/ling
export OMP_NUM_THREADS=1

# logged N COMMAND...: runs a command, which must succeed, on N ranks; what it prints goes to log.txt.
logged() { ranks "$@" >log.txt 2>&1 || problem "$* ranks: $(tail -c 400 log.txt)"; }

# value KEY JSON: a number of one JSON object, the first of that name.
value() { sed -n "s/.*\"$1\": *\([0-9.]*\).*/\1/p" <<<"$2"; }

# within WHAT PREDICTED MEASURED PERCENT
within() {
	awk -v p="$2" -v m="$3" -v most="$4" 'BEGIN { exit !(p != "" && m != "" && p - m <= m * most / 100 && m - p <= m * most / 100) }' ||
		problem "$1: predicted $2, measured $3, expected within $4 %"
}

# tokens PREFIX V: a token file of 8192 ids below V.
tokens() { write_tokens "$1" 8 'S<' $(perl -e 'srand 1; print join " ", map { int rand $ARGV[0] } 1 .. 8192' "$2"); }

tokens tokens 301
cat >small.yaml <<END
model:
  hidden_size: 64
  num_hidden_layers: 4
  num_attention_heads: 8
  num_key_value_heads: 4
  vocab_size: 301
  num_experts: 16
  num_experts_per_tok: 4
  num_shared_experts: 1
  moe_intermediate_size: 48
  first_k_dense_replace: 1
  intermediate_size: 96
  norm_head: true
  router: { balance_loss_coef: 0.015, z_loss_coef: 1e-4, warmup_steps: 4 }
data: { train: tokens, tokenizer: none, seq_len: 65 }
train: { output_dir: run, seed: 1, steps: 1, micro_batch: 2, batch: 11 }
schedule: { peak_lr: 1e-3 }
END

# peak.sh COMMAND...: runs a command and writes the peak of its resident memory to peak.RANK.
cat >peak.sh <<'END'
#!/bin/bash
"$@" &
while now=$(grep VmHWM /proc/$!/status 2>/dev/null); do
	peak=$now
	sleep 0.02
done
awk '{ print 1024 * $2 }' <<<"$peak" >"peak.$OMPI_COMM_WORLD_RANK"
wait $!
END
chmod +x peak.sh

# Every kind of traffic of a step, for ranks, tensor, expert and other keys: uneven slices, short and empty micro-batches, all recompute modes.
test_traffic() {
	local layout n plan line kind kinds most mtp="model.architecture=BailingMoeV2ForCausalLM model.norm_head=off model.n_group=1
		model.topk_group=1 model.num_nextn_predict_layers=2"
	for layout in "2 1 1" "2 2 1 train.recompute=attention" "2 1 2 train.recompute=layer" "2 2 2 model.norm_head=off" \
		"4 2 2 model.tie_word_embeddings=on" "4 2 4 train.recompute=layer" "4 4 2 train.batch=3" "4 1 4 train.batch=5" \
		"4 2 4 $mtp" "4 4 2 train.recompute=layer $mtp" "2 1 1 model.mtp_loss_scaling_factor=0 $mtp"; do
		set -- $layout
		n=$1
		set -- "parallel.tensor=$2" "parallel.expert=$3" "${@:4}"
		rm -rf run
		plan=$("$ling" info small.yaml --ranks "$n" --json "$@" | sed 's/.*"bytes_sent": {\([^}]*\)}, "memory_of.*/\1/')
		logged "$n" "$ling" train small.yaml "$@"
		line=$(sed -n 's/.*"bytes_sent": {\([^}]*\)}.*/\1/p' run/metrics.jsonl)
		kinds=$(tr ',' '\n' <<<"$line" | sed 's/.*"\(.*\)".*/\1/')
		[ "$(wc -l <<<"$kinds")" = 9 ] || problem "$layout: bytes_sent is $line"
		while read -r kind; do
			case $kind in
			"expert dispatch" | "expert return") most=30 ;; # the routing decides
			*) most=1 ;;
			esac
			within "$layout, $kind" "$(value "$kind" "$plan")" "$(value "$kind" "$line")" $most
		done <<<"$kinds"
	done
	rm -rf run
	"$ling" train small.yaml >log.txt 2>&1
	! grep -q bytes_sent run/metrics.jsonl || problem "a single process sends nothing, and says so: $(cat run/metrics.jsonl)"
}

# Peak resident memory of rank 0, some 400 MB, of which 25 MB are the libraries'.
test_memory() {
	local layout plan
	tokens many 16001
	for layout in "2 1 1" "2 2 2" "4 2 4"; do
		set -- $layout
		set -- "$1" model="{hidden_size: 512, num_hidden_layers: 3, num_attention_heads: 8, num_key_value_heads: 4, vocab_size: 16001, \
num_experts: 16, num_experts_per_tok: 4, num_shared_experts: 1, moe_intermediate_size: 256}" data.train=many data.seq_len=256 train.batch=4 \
			"parallel.tensor=$2" "parallel.expert=$3"
		rm -rf run
		plan=$("$ling" info small.yaml --ranks "$1" --json "${@:2}" | sed 's/.*"memory_bytes": {\([^}]*\)}, "bytes_sent.*/\1/')
		logged "$1" ./peak.sh "$ling" train small.yaml "${@:2}"
		within "$layout, memory" "$(value total "$plan")" "$(cat peak.0)" 15
	done
}

# What `ling info --inference` predicts against `ling eval --data`: what rank 0 sends for its tokens, by kind; and its peak memory, of weights
# that are used in their files, by ranks that each have some of the experts.
test_inference() {
	local layout n plan kind bytes windows most tokens=$((31 * 65)) args
	rm -rf run
	logged 1 "$ling" train small.yaml train.stop_at_step=1
	for layout in "2 2 1" "2 1 2" "4 2 2" "4 2 4" "4 4 1" "4 1 4" "4 1 2"; do
		IFS=' ' read -r n tensor expert <<<"$layout"
		args=(--tensor "$tensor" --expert "$expert")
		"$ling" info run --ranks "$n" --inference --tokens 130 --json "${args[@]}" >plan.txt 2>log.txt || problem "$layout: $(cat log.txt)"
		windows=$((31 * $(jq '.data * .replicas' plan.txt)))
		logged "$n" "$ling" eval run --data tokens --seq-len 65 --max-windows $windows --batch 1 "${args[@]}"
		has log.txt "note: $n ranks ($(jq .replicas plan.txt) replica"
		for kind in "tensor gather" "tensor sum" "expert plan" "expert dispatch" "expert return"; do
			bytes=$(sed -n "s/.*note: $n ranks.*[:,] $kind \\([0-9]*\\).*/\\1/p" log.txt)
			case $kind in
			"expert plan") plan=$(jq --arg k "$kind" '.bytes_sent["forward pass"][$k] // 0 | . * 31' plan.txt) most=0 ;;
			"tensor"*) plan=$(jq --arg k "$kind" --argjson t $tokens '.bytes_sent.token[$k] // 0 | . * $t' plan.txt) most=2 ;;
			*) plan=$(jq --arg k "$kind" --argjson t $tokens '.bytes_sent.token[$k] // 0 | . * $t' plan.txt) most=30 ;; # the routing decides
			esac
			within "$layout, $kind" "$plan" "${bytes:-0}" $most
		done
	done
	tokens many 16001
	rm -rf run
	logged 1 "$ling" train small.yaml model="{hidden_size: 512, num_hidden_layers: 6, num_attention_heads: 8, num_key_value_heads: 4, \
vocab_size: 16001, num_experts: 16, num_experts_per_tok: 4, num_shared_experts: 1, moe_intermediate_size: 256}" data.train=many train.batch=1 \
		train.micro_batch=1 data.seq_len=16
	for layout in "2 1 1" "2 2 1" "2 1 2" "4 2 4"; do
		IFS=' ' read -r n tensor expert <<<"$layout"
		args=(--tensor "$tensor" --expert "$expert")
		plan=$("$ling" info run --ranks "$n" --inference --tokens 512 --json "${args[@]}" 2>log.txt | jq .memory_bytes.total)
		logged "$n" ./peak.sh "$ling" eval run --data many --seq-len 512 --max-windows 8 --batch 1 "${args[@]}"
		within "inference, $layout, memory" $((plan + 20000000 + 5000000 * n)) "$(cat peak.0)" 5 # libraries, and shared memory with each rank
	done
	for layout in "1 1 2" "3 1 3" "2 3 1"; do
		IFS=' ' read -r n tensor expert <<<"$layout"
		refused 1 "it must divide the $n ranks" --ranks "$n" --inference --tensor "$tensor" --expert "$expert"
	done
	refused 2 "goes with --ranks" --inference
	refused 2 "go with --inference" --ranks 2 --tensor 2
	"$ling" info "$root/configs/ling-plus.yaml" --ranks 2 --inference --weights bf16 --memory-per-node 128GB >log.txt || problem "no answer for Ling-Plus on 2 ranks"
	has log.txt "no layout fits 128.000 GB a rank; --tensor 2 --expert 2 needs least"
}

# refused STATUS TEXT WORDS...: ling info with these words fails and says TEXT.
refused() {
	"$ling" info small.yaml "${@:3}" >log.txt 2>&1
	[ $? = "$1" ] || problem "expected exit status $1: ${*:3}"
	grep -q "$2" log.txt || problem "no '$2' in: $(cat log.txt)"
}

test_plan() {
	"$ling" info "$root/configs/ling-plus.yaml" --ranks 512 --memory-per-node 256GB >log.txt || problem "no plan for Ling-Plus"
	grep -q "layouts that fit 256.000 GB" log.txt || problem "$(cat log.txt)"
	"$ling" info "$root/configs/ling-plus.yaml" --ranks 2 --memory-per-node 256GB >log.txt || problem "no answer for Ling-Plus on 2 ranks"
	grep -q "no layout fits" log.txt || problem "$(cat log.txt)"
	# A rank without work is counted, and comes last in the list.
	"$ling" info small.yaml --ranks 2 train.batch=16 train.micro_batch=16 >log.txt || problem "no plan for 2 ranks"
	has log.txt "1 of 2 data ranks have nothing to do: set train.micro_batch=8"
	[ "$(tail -n 1 log.txt | awk '{ print $1, $NF }')" = "2 1" ] || problem "the last layout should be the idle one: $(cat log.txt)"
	[ "$("$ling" info small.yaml --ranks 4 train.batch=11 train.micro_batch=4 --json | jq -c '[.idle_data_ranks, (.layouts[] | select(.data == 4) | .idle_data_ranks)] | unique')" = "[1]" ] ||
		problem "idle ranks of 4: $("$ling" info small.yaml --ranks 4 train.batch=11 train.micro_batch=4 --json)"
	"$ling" info small.yaml --ranks 2 train.batch=16 train.micro_batch=8 >log.txt
	! grep -q "nothing to do" log.txt || problem "$(cat log.txt)"
	for size in 300KB 300kb 300kB 0.3mb; do
		"$ling" info small.yaml --ranks 2 --memory-per-node $size >log.txt && grep -q "no layout fits 300.000 kB a rank" log.txt || problem "$size: $(cat log.txt)"
	done
	refused 1 "1, 2, 4 would work" --ranks 4 parallel.tensor=3
	refused 2 "go with --ranks" --memory-per-node 1GB
	refused 2 "such as 256GB" --ranks 4 --memory-per-node 256
}

# Data ranks that no micro-batch is left for: the warning says what helps, and taking its word helps.
test_idle() {
	local warning="^warning: 1 of 2 data ranks have nothing to do"
	rm -rf run
	logged 2 "$ling" train small.yaml train.batch=8 train.micro_batch=8
	[ "$(grep -c "$warning.*train.batch=8 has 8 sequences in each micro-batch: set train.micro_batch=4\$" log.txt)" = 1 ] || problem "$(cat log.txt)"
	rm -rf run
	logged 2 "$ling" train small.yaml train.batch=8 train.micro_batch=4
	! grep -q "nothing to do" log.txt || problem "$(cat log.txt)"
	rm -rf run
	logged 2 "$ling" train small.yaml train.batch=1 train.micro_batch=1
	grep -q "$warning.*make it at least 2, or start 1 ranks" log.txt || problem "$(cat log.txt)"
	rm -rf run
	logged 2 "$ling" train small.yaml train.batch=8 train.micro_batch=2 train.batch_warmup='{start: 2, increment: 2, tokens: 1000}'
	grep -q "$warning while the batch warmup's batch is 2: set train.micro_batch=1 or train.batch_warmup.start=3" log.txt || problem "$(cat log.txt)"
}

test_crowd() {
	local cores
	cores=$(env -u OMP_NUM_THREADS nproc) # which would obey it
	rm -rf run
	OMP_NUM_THREADS=$cores logged 2 "$ling" train small.yaml
	[ "$(grep -c "^warning: .* 2 ranks with $((2 * cores)) threads in all may use $cores core" log.txt)" = 1 ] || problem "$(cat log.txt)"
	rm -rf run
	OMP_NUM_THREADS=1 taskset -c 0 "$ling" train small.yaml >log.txt 2>&1
	! grep -q "^warning" log.txt || problem "one thread on one core: $(cat log.txt)"
}

check traffic memory inference plan idle crowd
finish
