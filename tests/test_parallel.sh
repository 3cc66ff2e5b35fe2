#!/bin/bash
# Training on several ranks: every layout against one process, checkpoints that change layouts, ranks that die or disagree.
. "$(dirname "$0")/check.sh"
ling=$root/ling
compare=$root/build/compare_checkpoints
export OMP_NUM_THREADS=1

# train RANKS DIR OPTIONS...: a run that must succeed; one rank is a process without a launcher.
train() {
	local n=$1 out=$2 launch=
	shift 2
	[ "$n" = 1 ] || launch="ranks $n"
	$launch "$ling" train tiny.yaml train.output_dir="$out" "$@" >out.txt 2>err.txt ||
		problem "$n ranks, $out $*: exit status $?: $(head -c 600 err.txt)"
}

# refused RANKS TEXT COMMAND...: ends within seconds, not with 0, and with one error line, which holds TEXT.
refused() {
	local n=$1 text=$2 start=$SECONDS status
	shift 2
	ranks "$n" "$@" >out.txt 2>err.txt
	status=$?
	[ $status != 0 ] || problem "exit status 0: $n ranks $*"
	[ $((SECONDS - start)) -le 10 ] || problem "$((SECONDS - start)) seconds: $n ranks $*"
	grep '^ling: ' err.txt | grep -qF -- "$text" || problem "no '$text' in: $(grep '^ling' err.txt || head -c 400 err.txt)"
	[ "$(grep -c '^ling' err.txt)" = 1 ] || problem "expected one error line, found: $(head -c 1000 err.txt)"
}

# agree DIR DIR [TOLERANCE [LOSSES]]: the metrics of two runs, step by step; what counts must be equal, losses and norm near.
agree() {
	awk -v other="$2/metrics.jsonl" -v tolerance="${3:-1e-5}" -v losses="${4:-${losses:-loss balance_loss z_loss grad_norm lr}}" '
		function value(line, key) {
			if (!match(line, "\"" key "\": *[-+0-9.eE]+"))
				return "none"
			line = substr(line, RSTART, RLENGTH)
			sub(/.*: */, "", line)
			return line
		}
		{
			if ((getline theirs <other) <= 0) { print "is shorter"; exit }
			n = split("step samples tokens batch", exact, " ")
			for (i = 1; i <= n; i++)
				if (value($0, exact[i]) != value(theirs, exact[i])) { print exact[i] ": " $0 " against " theirs; exit }
			n = split(losses, near, " ")
			for (i = 1; i <= n; i++) {
				a = value($0, near[i]); b = value(theirs, near[i])
				if (a == "none" || b == "none" || !((a - b) ^ 2 <= (tolerance * a) ^ 2)) { # a < b would compare text
					print near[i] " of step " NR ": " a " against " b
					exit
				}
			}
		}
		END { if (NR == 0) print "has no steps"; else if ((getline theirs <other) > 0) print "is longer" }' "$1/metrics.jsonl" >agree.txt 2>&1
	[ ! -s agree.txt ] || problem "$1 and $2: $(head -n 1 agree.txt)"
}

# tensors KIND PREFIX DIR DIR TOLERANCE: the tensors of two checkpoints.
tensors() { "$compare" "$@" >compare.txt 2>&1 || problem "$3 and $4: $(cat compare.txt)"; }

# sent KIND DIR: bytes that rank 0 sent in the first step.
sent() { jq -n --arg kind "$1" 'input.bytes_sent[$kind]' "$2/metrics.jsonl"; }

same_files() { diff -rq "$1" "$2" -x trainer.json >diff.txt || problem "$(head -n 3 diff.txt)"; }

# RANKS TENSOR EXPERT of every layout with 1, 2 or 4 data, tensor and expert ranks.
layouts="2,1,1 2,1,2 2,2,1 2,2,2 4,1,1 4,1,2 4,1,4 4,2,1 4,2,2 4,2,4 4,4,1 4,4,2 4,4,4 8,2,1 8,2,2 8,2,4 8,4,1 8,4,2 8,4,4"

# equal NAME "RANKS,TENSOR,EXPERT ..." OPTIONS...: the run on one process and on these layouts.
equal() {
	local name=$1 those=$2 n tensor expert
	shift 2
	train 1 "$name" "$@"
	for layout in $those; do
		IFS=, read -r n tensor expert <<<"$layout"
		train "$n" "$name-$layout" "$@" parallel.tensor="$tensor" parallel.expert="$expert"
		agree "$name" "$name-$layout"
	done
}

# ---- data: 40 windows of 16 tokens. The vocabulary is not divisible by tensor ranks, and tokens of a micro-batch are where seq_len is odd ----
head -c 640 "$root/LICENSE" >text.txt
tail -c 200 "$root/LICENSE" >valid.txt
"$ling" tokenize --out text text.txt >/dev/null && "$ling" tokenize --out valid valid.txt >/dev/null || exit 1
tiny model.num_attention_heads=8 model.num_key_value_heads=4 model.num_experts=8 model.intermediate_size=24 schedule.peak_lr=1e-3 \
	schedule.warmup_steps=5 model.router='{ balance_loss_scope: micro_batch, z_loss_coef: 1e-2, balance_loss_coef: 0.1 }'
everything="model.use_bias=true model.use_qkv_bias=true model.first_k_dense_replace=1 model.router.balance_loss_scope=sequence
	model.router.warmup_steps=15 data.seq_len=15 model.num_hidden_layers=3"
mtp="model.architecture=BailingMoeV2ForCausalLM model.n_group=4 model.topk_group=2 model.partial_rotary_factor=0.67 model.use_bias=true
	model.use_qkv_bias=true model.first_k_dense_replace=1 data.seq_len=15 model.num_nextn_predict_layers=2 model.mtp_loss_scaling_factor=0.5"

test_values() {
	for n in 1 2 3; do
		ranks $n "$root/build/test_parallel" >values.txt 2>err.txt || problem "$n ranks: $(grep -v OK values.txt) $(head -c 300 err.txt)"
		[ "$(grep -c '   OK ' values.txt)" -ge 15 ] || problem "$n ranks: $(cat values.txt)"
	done
	ranks 8 "$root/build/test_parallel" >values.txt 2>err.txt || problem "8 ranks: $(cat values.txt) $(head -c 300 err.txt)"
	[ "$(grep -c '   OK ' values.txt)" = 3 ] || problem "8 ranks: $(cat values.txt)"
}

test_micro_batches_of_4() { equal four "$layouts" train.micro_batch=4; }
# Each rank adds up the gradients of several micro-batches, the last ones of some ranks short or empty.
test_accumulation() { equal one "$layouts" train.micro_batch=1 $everything; }

test_variants() {
	equal tied "2,2,1 8,2,4" model.tie_word_embeddings=true train.recompute=layer train.batch_warmup='{start: 2, increment: 2, tokens: 500}'
	equal tied_plain "4,4,2" model.tie_word_embeddings=true model.norm_head=false train.recompute=attention train.micro_batch=1 $everything
	equal recompute "8,4,2" train.recompute=layer $everything
	equal uneven "6,2,2 3,1,1" train.batch=10 model.num_experts=6
	equal one_layer "4,1,4 2,2,2" model.num_hidden_layers=1 model.num_experts=4 model.num_experts_per_tok=4 model.num_shared_experts=0
	equal one_expert "8,1,8 4,2,4" model.num_experts_per_tok=1 train.grad_clip=0.1 train.micro_batch=1
	equal few "8,1,2 8,4,4" train.batch=1 train.micro_batch=3 train.steps=5
	equal short "8,4,8" train.batch=1 train.micro_batch=1 data.seq_len=3 train.steps=5 # more ranks than tokens
}

# MTP layers: their loss too, several micro-batches, some of them empty; a run that continues has the same bits.
test_mtp() {
	local n tensor expert layout stop losses="loss mtp_loss balance_loss z_loss grad_norm lr" run=($mtp train.micro_batch=1 train.steps=8)
	equal mtp "2,2,1 4,2,2 8,2,4 3,1,1" "${run[@]}"
	equal mtp-layer "4,4,2 2,1,2" "${run[@]}" train.recompute=layer model.tie_word_embeddings=true train.micro_batch=4
	equal mtp-few "8,4,8" $mtp train.batch=1 train.micro_batch=1 data.seq_len=3 train.steps=5 # more ranks than tokens
	for layout in 1,1,1 4,2,2; do
		IFS=, read -r n tensor expert <<<"$layout"
		for stop in 3 8; do
			train "$n" mtp-parts-$n "${run[@]}" parallel.tensor="$tensor" parallel.expert="$expert" train.stop_at_step=$stop
		done
	done
	same_files mtp/step-0000008 mtp-parts-1/step-0000008
	same_files mtp-4,2,2/step-0000008 mtp-parts-4/step-0000008
	# Recomputing changes no bit. Evaluation does not compute the MTP layers, and without the factor training does not.
	train 4 mtp-again "${run[@]}" parallel.tensor=2 parallel.expert=2 train.recompute=layer
	same_files mtp-4,2,2/step-0000008 mtp-again/step-0000008
	train 1 without "${run[@]}" model.mtp_loss_scaling_factor=0
	train 4 without-4 "${run[@]}" model.mtp_loss_scaling_factor=0 parallel.tensor=2
	agree without without-4 1e-5 "loss balance_loss z_loss grad_norm lr"
	! grep -q mtp_loss without/metrics.jsonl || problem "$(head -n 1 without/metrics.jsonl)"
}

# The balance loss with several sequences in a micro-batch: the tokens of a tensor rank begin and end within a sequence.
test_balance_shares() {
	local scope
	for scope in sequence micro_batch; do
		equal shares-$scope "2,2,1 4,4,2" train.micro_batch=3 data.seq_len=15 model.router.balance_loss_scope=$scope train.steps=8
	done
}

# A blend of a text and conversations: windows of several documents, some with few targets and some with none.
test_blend() {
	perl -e 'for (1 .. 30) { my $n = $_ * 7 % 23; print qq({"prompt": ") . "question $n " x ($_ % 5 + 1) . qq(", "completion": ") . "x" x $n . qq("}\n) }' >chat.jsonl
	"$ling" tokenize --out chat chat.jsonl >/dev/null || problem "no chat"
	local blend=(data.train='[{path: text, weight: 1}, {path: chat, weight: 2.5}]' data.valid=chat data.document_mask=true train.micro_batch=1)
	equal blend "2,1,1 2,2,1 4,2,2 8,4,4" "${blend[@]}"
	equal packed "4,1,1 4,2,2 3,1,1" data.train=chat data.valid=chat data.seq_len=60 train.micro_batch=1
	equal blend_layer "4,2,4" "${blend[@]}" $everything train.recompute=layer
	! cmp -s <(steady blend/metrics.jsonl) <(steady four/metrics.jsonl) || problem "a blend is as good as none"
	train 2 blended "${blend[@]}" train.stop_at_step=7
	train 4 blended "${blend[@]}" parallel.tensor=2 train.stop_at_step=12
	train 1 blended "${blend[@]}"
	agree blend blended
	[ "$(grep -o '"source_samples": [^]]*' blend/metrics.jsonl)" = "$(grep -o '"source_samples": [^]]*' blended/metrics.jsonl)" ] || problem "source_samples differ"
}

# The loss over a token file has the same bits for any batch and any number of data ranks, and is that of its windows, each alone, in order. A
# layout with tensor or expert ranks rounds otherwise, but not by the batch.
test_evaluation() {
	local n batch one data layout tensor expert
	train 1 trained train.steps=3
	for data in "text --seq-len 16" "text --seq-len 7 --document-mask --max-windows 35"; do
		expect 0 "" "$ling" eval trained --data $data --batch 1 --json
		one=$(cat out.txt)
		for batch in "" "--batch 3" "--batch 40"; do
			OMP_NUM_THREADS=3 expect 0 "" "$ling" eval trained --data $data $batch --json
			[ "$(cat out.txt)" = "$one" ] || problem "$data: $(cat out.txt) with $batch, $one with --batch 1"
		done
		for n in 2 3 4; do
			ranks $n "$ling" eval trained --data $data --batch $n --json >out.txt 2>err.txt || problem "$n ranks: $(head -c 300 err.txt)"
			[ "$(cat out.txt)" = "$one" ] || problem "$data: $(cat out.txt) on $n ranks, $one on 1"
		done
	done
	one=
	for layout in 1,1,1 2,1,1 4,1,1 4,2,2; do
		IFS=, read -r n tensor expert <<<"$layout"
		[ $((tensor * expert)) = 1 ] || one=
		for batch in 1 3; do
			rm -rf start
			train "$n" start train.init_from=trained data.valid='[text, valid]' eval.at_start=true train.micro_batch=$batch train.steps=1 eval.every=off \
				parallel.tensor="$tensor" parallel.expert="$expert"
			metric valid_loss start/events.jsonl >loss.txt
			[ -n "$one" ] || one=$(cat loss.txt)
			[ -s loss.txt ] && [ "$(cat loss.txt)" = "$one" ] || problem "layout $layout, micro-batch $batch: valid_loss $(cat loss.txt), was $one"
		done
	done
	cp text.idx bad.idx && cp text.bin bad.bin
	perl -e 'open F, "+<", "bad.bin" or die; seek F, 2 * 600, 0; print F "\xff\xff"'
	for n in 1 3; do
		refused $n "bad.bin: token 600: id 65535 is outside the vocabulary" "$ling" eval trained --data bad --seq-len 16 --batch 2
	done
}

# In double: some gradients, of biases above all, are small sums of large terms, of which float leaves few digits in any layout.
test_every_gradient() {
	local n tensor expert options ling=$root/build/ling_double compare=$root/build/compare_checkpoints_double
	for options in "train.micro_batch=4" "train.micro_batch=1 model.num_experts_per_tok=5 $everything" "train.micro_batch=1 $mtp" \
			"train.micro_batch=4 $mtp model.tie_word_embeddings=true train.recompute=layer data.document_mask=true"; do
		rm -rf gradient*
		train 1 gradient $options train.stop_at_step=1
		for layout in 2,1,2 2,2,1 4,2,4 8,2,2 8,4,4; do
			IFS=, read -r n tensor expert <<<"$layout"
			train "$n" gradient-$layout $options train.stop_at_step=1 parallel.tensor="$tensor" parallel.expert="$expert"
			tensors optimizer exp_avg. gradient/step-0000001 gradient-$layout/step-0000001 1e-11
			tensors model "" gradient/step-0000001 gradient-$layout/step-0000001 1e-11
		done
	done
}

test_bit_equal() {
	for run in same same2; do
		train 8 $run $everything parallel.tensor=2 parallel.expert=4 train.micro_batch=1
	done
	same_files same/step-0000020 same2/step-0000020
	cmp -s <(steady same/metrics.jsonl) <(steady same2/metrics.jsonl) || problem "metrics of the same run differ"
}

# Four layouts one after the other, the first change in the middle of the batch's warmup.
test_change_of_layout() {
	local run=(train.batch_warmup='{start: 2, increment: 2, tokens: 500}' data.valid=valid eval.every=7 train.micro_batch=1)
	train 1 whole $everything "${run[@]}"
	train 8 parts $everything "${run[@]}" parallel.tensor=4 parallel.expert=2 train.stop_at_step=5
	train 6 parts $everything "${run[@]}" parallel.tensor=2 parallel.expert=2 train.stop_at_step=10
	train 1 parts $everything "${run[@]}" train.stop_at_step=15
	train 4 parts $everything "${run[@]}" parallel.expert=4
	agree whole parts
	[ "$(lines parts/metrics.jsonl)" = 20 ] || problem "$(lines parts/metrics.jsonl) steps"
	local loss other
	loss=$("$ling" eval whole/step-0000020 --data valid --seq-len 15 --json)
	other=$("$ling" eval parts/step-0000020 --data valid --seq-len 15 --json)
	awk -v a="$loss" -v b="$other" 'BEGIN { sub(/.*"loss": /, "", a); sub(/.*"loss": /, "", b); exit !(a + 0 > 1 && (a - b) ^ 2 < (1e-5 * a) ^ 2) }' ||
		problem "ling eval: $loss and $other"
	ranks 3 "$ling" eval parts/step-0000020 --data valid --seq-len 15 --json >out.txt 2>err.txt || problem "eval on 3 ranks: $(head -c 300 err.txt)"
	[ "$(cut -c 1-20 out.txt)" = "$(cut -c 1-20 <<<"$other")" ] || problem "ling eval on 3 ranks: $(cat out.txt), on one: $other"
	[ "$(grep -c valid_loss parts/metrics.jsonl)" = 3 ] || problem "evaluations: $(grep -c valid_loss parts/metrics.jsonl)"
	awk 'FNR == NR && match($0, /"valid_loss": [0-9.]+/) { v[FNR] = substr($0, RSTART + 14, RLENGTH - 14) }
		FNR != NR && match($0, /"valid_loss": [0-9.]+/) { d = v[FNR] / substr($0, RSTART + 14, RLENGTH - 14) - 1; if (d ^ 2 > 1e-10) exit 1 }' \
		whole/metrics.jsonl parts/metrics.jsonl || problem "valid_loss of whole and parts"
}

# The router of Ling 2.0, with noise and all losses. In double, where all layouts choose the same experts, the expert bias has the same bits on
# all of them: it comes from whole numbers. A run that continues has the bits of one that does not.
v2="model.architecture=BailingMoeV2ForCausalLM model.norm_head=false model.num_experts_per_tok=3 model.n_group=4 model.topk_group=2
	model.routed_scaling_factor=2.5 model.first_k_dense_replace=1 model.num_hidden_layers=3 model.head_dim=12 model.partial_rotary_factor=0.5
	model.num_nextn_predict_layers=1 model.router.warmup_steps=6 model.router.bias_update_rate=3e-3"
test_expert_bias() {
	local layout n tensor expert layer
	equal v2 "2,1,2 4,4,2" train.micro_batch=1 data.seq_len=15 $v2
	equal v2_layer "8,2,4" train.micro_batch=4 train.recompute=layer $v2
	! cmp -s <(steady v2_layer/metrics.jsonl | jq -c .expert_bias) <(steady v2/metrics.jsonl | jq -c .expert_bias) || problem "other data, the same bias"
	jq -es 'all(.[]; .expert_bias | length == 3 and all(.[]; . > 0)) and (.[0].expert_bias | all(.[]; . >= 1.5e-3 and . < 6e-3))' v2/metrics.jsonl >out.txt ||
		problem "$(head -n 1 v2/metrics.jsonl)"
	train 1 unlike train.steps=1
	grep -q expert_bias unlike/metrics.jsonl && problem "a bias in $(cat unlike/metrics.jsonl)"
	local ling=$root/build/ling_double compare=$root/build/compare_checkpoints_double
	train 1 bias $v2
	for layout in 2,1,2 4,2,2 8,4,4; do
		IFS=, read -r n tensor expert <<<"$layout"
		train "$n" bias-$layout $v2 parallel.tensor="$tensor" parallel.expert="$expert"
		agree bias bias-$layout 1e-10
		tensors model "" bias/step-0000020 bias-$layout/step-0000020 1e-10
		for layer in 1 2 3; do # the last one is for multi-token prediction
			tensors model model.layers.$layer.mlp.gate.expert_bias bias/step-0000020 bias-$layout/step-0000020 0
			tensors optimizer exp_avg_sq.model.layers.$layer.mlp.gate.expert_bias bias/step-0000020 bias-$layout/step-0000020 0
		done
	done
	ling=$root/ling compare=$root/build/compare_checkpoints
	for layout in parallel.reduce=f32 parallel.reduce=bf16; do
		rm -rf bias-whole bias-parts
		train 4 bias-whole $v2 parallel.expert=2 $layout health.every=1
		train 4 bias-parts $v2 parallel.expert=2 $layout health.every=1 train.stop_at_step=7
		train 4 bias-parts $v2 parallel.expert=2 $layout health.every=1
		same_files bias-whole/step-0000020 bias-parts/step-0000020
	done
	train 1 still $v2 model.router.bias_update_rate=off
	jq -es 'all(.[]; .expert_bias == [0, 0, 0])' still/metrics.jsonl >out.txt || problem "rate 0: $(head -n 1 still/metrics.jsonl)"
	cp -r v2/step-0000020 unbiased
	sed -i 's/"moe_router_enable_expert_bias": true/"moe_router_enable_expert_bias": false/' unbiased/config.json
	for n in 1 2; do
		refused $n "expert_bias has" "$ling" eval unbiased --data valid --seq-len 16
		refused $n "moe_router_enable_expert_bias is false" "$ling" train tiny.yaml $v2 model.moe_router_enable_expert_bias=false \
			model.router.bias_update_rate=off train.init_from=unbiased train.output_dir=refused
	done
}

# Expert e's weights are e; every other tensor is what it was. Updates of 1e-30 leave them so. In double, as above.
test_experts_stay() {
	local ling=$root/build/ling_double compare=$root/build/compare_checkpoints_double
	local still="schedule.peak_lr=1e-30 schedule.warmup_steps=off $everything"
	train 1 seed $everything train.stop_at_step=1
	mkdir -p constant && cp seed/step-0000001/config.json constant
	"$compare" constant seed/step-0000001 constant || problem "no starting model"
	train 4 moved $still train.init_from=constant parallel.tensor=2 parallel.expert=2 train.stop_at_step=1
	tensors model "" constant moved/step-0000001 1e-7
	for layout in 1,1,1 2,1,2 4,4,4 8,2,8; do
		local n tensor expert
		IFS=, read -r n tensor expert <<<"$layout"
		rm -rf moved-$layout && cp -r moved moved-$layout
		train "$n" moved-$layout $still train.init_from=constant parallel.tensor="$tensor" parallel.expert="$expert" train.stop_at_step=2
		tensors model "" constant moved-$layout/step-0000002 1e-7
		tensors optimizer exp_avg moved-1,1,1/step-0000002 moved-$layout/step-0000002 1e-9
		agree moved-1,1,1 moved-$layout 1e-11
	done
}

# All tokens go to experts 0 and 1, and so to one rank; the others receive nothing.
test_all_to_one() {
	mkdir -p first && cp four/step-0000020/config.json first
	"$compare" first four/step-0000020 first || problem "no starting model"
	equal crowd "2,1,2 8,2,4 8,4,8" train.init_from=first train.steps=6 train.micro_batch=4
	sed -n '1s/.*"expert_load": *//p' crowd/metrics.jsonl | grep -q '^\[4.0, 4.0\]' || problem "$(head -n 1 crowd/metrics.jsonl)"
	# Both experts of a token are on one rank: its row of 16 floats goes and comes back once in each pass, not twice. Rank 0 sends back rows
	# for the 3 x 16 tokens of rank 1, and the gradients of two weights of each, in 2 layers.
	[ "$(sent "expert return" crowd-2,1,2)" = $((2 * 48 * 4 * (2 * 16 + 2))) ] || problem "expert return: $(sent "expert return" crowd-2,1,2) bytes"
}

# Gradients and changes of weights in bfloat16: half the bytes, the same bits each time and in every replica, continued or not.
test_bf16() {
	local run=(train.micro_batch=1 health.every=1) layout=(parallel.tensor=2 parallel.expert=2) kind name
	train 1 alone "${run[@]}" parallel.reduce=bf16
	train 1 alone-f32 "${run[@]}"
	same_files alone/step-0000020 alone-f32/step-0000020
	for name in half half2; do
		train 4 $name "${run[@]}" "${layout[@]}" parallel.reduce=bf16
	done
	same_files half/step-0000020 half2/step-0000020
	train 4 half-parts "${run[@]}" "${layout[@]}" parallel.reduce=bf16 train.stop_at_step=7
	train 4 half-parts "${run[@]}" "${layout[@]}" parallel.reduce=bf16
	same_files half/step-0000020 half-parts/step-0000020
	train 4 whole-f32 "${run[@]}" "${layout[@]}"
	agree whole-f32 half 2e-3 loss
	! diff -rq half/step-0000020 whole-f32/step-0000020 -x trainer.json >diff.txt || problem "bf16 gives the bits of f32"
	for kind in gradients weights; do
		[ $((2 * $(sent $kind half))) = "$(sent $kind whole-f32)" ] || problem "$kind: $(sent $kind half) bytes, in f32 $(sent $kind whole-f32)"
	done
}

test_refused() {
	refused 6 "1, 2" "$ling" train tiny.yaml parallel.tensor=3
	refused 8 "1, 2, 4" "$ling" train tiny.yaml parallel.tensor=8 # 4 key-value heads
	refused 6 "1, 2" "$ling" train tiny.yaml parallel.expert=3
	refused 4 "vocabulary" "$ling" train tiny.yaml parallel.tensor=4 model.vocab_size=3 data.tokenizer=none
	refused 2 "hidden_size" "$ling" train tiny.yaml model.hiden_size=3
	refused 2 "nothere" "$ling" train tiny.yaml data.train=nothere
	refused 2 "nothere" "$ling" train tiny.yaml train.init_from=nothere
	[ -z "$(ls run 2>/dev/null)" ] || problem "left behind: $(ls run)"
	"$ling" train tiny.yaml parallel.tensor=2 2>err.txt && problem "tensor 2 on one process"
	grep -q "parallel.tensor is 2" err.txt || problem "$(cat err.txt)"
}

# What rank 1 is given differs.
test_ranks_that_disagree() {
	cat >disagree.sh <<-END
		#!/bin/bash
		[ \$OMPI_COMM_WORLD_RANK = 1 ] && \$CHANGE
		exec "$ling" "\$@" \$ARGUMENT
	END
	chmod +x disagree.sh
	mkdir -p elsewhere && cp tiny.yaml elsewhere
	(cd elsewhere && head -c 640 "$root/ling.c" >text.txt && "$ling" tokenize --out text text.txt && "$ling" tokenize --out valid text.txt) >/dev/null
	local run="train tiny.yaml train.output_dir=differ"
	CHANGE="export ARGUMENT=train.seed=4" refused 4 "rank 1 on" ./disagree.sh $run
	grep -q "config differs" err.txt || problem "$(cat err.txt)"
	CHANGE="export ARGUMENT=model.hiden_size=4" refused 4 "rank 1 on" ./disagree.sh $run
	CHANGE="cd elsewhere" refused 4 "rank 1 on" ./disagree.sh $run
	grep -q "data.train differs" err.txt || problem "$(cat err.txt)"
	cp text.* elsewhere
	CHANGE="cd elsewhere" refused 4 "rank 1 on" ./disagree.sh $run data.valid=valid
	grep -q "data.valid differs" err.txt || problem "$(cat err.txt)"
	rm elsewhere/text.idx
	CHANGE="cd elsewhere" refused 4 "rank 1 on" ./disagree.sh $run
	CHANGE="exit 3"
	export CHANGE
	local start=$SECONDS
	ranks 4 ./disagree.sh $run >out.txt 2>err.txt && problem "exit status 0 with a rank that did not start"
	[ $((SECONDS - start)) -le 10 ] || problem "a rank that did not start: $((SECONDS - start)) seconds"
	unset CHANGE
}

# A token file goes bad while it is in use. Each rank reads only its own sequences: of every 8, rank 1 has 2, 3, 6 and 7.
test_reading_error() {
	rm -rf bad* && cp text.bin bad.bin && cp text.idx bad.idx
	ranks 2 "$ling" train tiny.yaml data.train=bad train.output_dir=bad-run data.shuffle=off train.micro_batch=2 train.batch=8 \
		train.steps=100000 checkpoint.every=0 >out.txt 2>err.txt &
	local pid=$!
	wait_for_lines bad-run/metrics.jsonl 3
	perl -e 'open F, "+<", "bad.bin" or die; seek F, 2 * 97, 0; print F "\xff\xff"' # the second id of window 6 of 40, which no other has
	wait $pid && problem "exit status 0 with an id outside the vocabulary"
	grep -q '^ling: rank 1 on .*bad.bin: token 97: id 65535 is outside the vocabulary' err.txt || problem "$(head -c 600 err.txt)"
	[ "$(grep -c '^ling' err.txt)" = 1 ] || problem "expected one error line, found: $(head -c 600 err.txt)"
}

# Rank numbers come with their process numbers: pid.RANK.
cat >launch.sh <<END
#!/bin/bash
echo \$\$ >pid.\$OMPI_COMM_WORLD_RANK
exec "$ling" "\$@"
END
chmod +x launch.sh
long="$everything train.steps=60 train.micro_batch=1 parallel.tensor=2 parallel.expert=4"

# continues DIR: the same command again ends as the run that nothing happened to.
continues() {
	[ -e long ] || train 8 long $long checkpoint.every=20
	train 8 "$1" $long checkpoint.every=20
	same_files long/step-0000060 "$1/step-0000060"
	cmp -s <(steady long/metrics.jsonl) <(steady "$1/metrics.jsonl") || problem "metrics of long and $1 differ"
}

test_kill_in_a_step() {
	ranks 8 ./launch.sh train tiny.yaml train.output_dir=killed $long checkpoint.every=5 >out.txt 2>err.txt &
	wait_for_lines killed/metrics.jsonl 12
	local start=$SECONDS
	kill -9 "$(cat pid.5)"
	wait $! && problem "exit status 0 with a rank killed"
	[ $((SECONDS - start)) -le 10 ] || problem "mpirun lived on for $((SECONDS - start)) seconds"
	[ ! -e killed/step-0000060 ] || problem "the run was over before it was killed"
	[ -e killed/step-0000005 ] || [ -e killed/step-0000010 ] || problem "no checkpoint: $(ls killed)"
	continues killed
}

test_kill_in_a_save() {
	local tries=0 hit=
	while [ -z "$hit" ] && [ $tries -lt 10 ]; do
		rm -rf unsaved
		ranks 8 ./launch.sh train tiny.yaml train.output_dir=unsaved $long checkpoint.every=1 >out.txt 2>err.txt &
		wait_for_lines unsaved/metrics.jsonl 8
		while [ -z "$(compgen -G 'unsaved/.tmp*/model-0*')" ] && kill -0 $! 2>/dev/null; do :; done
		kill -9 "$(cat pid.3)"
		wait $! && problem "exit status 0 with a rank killed"
		hit=$(compgen -G 'unsaved/.tmp*')
		tries=$((tries + 1))
	done
	[ -n "$hit" ] || problem "no kill met a save"
	[ "$(ls -d unsaved/step-* | wc -l)" -ge 1 ] || problem "no checkpoint: $(ls -A unsaved)"
	continues unsaved
	[ -z "$(compgen -G 'unsaved/.tmp*')" ] || problem "left behind: $(ls -A unsaved)"
}

# SIGUSR1 to mpirun, which hands it on at once, and SIGTERM to a single rank: all save, stop, and continue.
test_signals() {
	local whom pid status
	for whom in mpirun rank; do
		mpirun -n 8 --oversubscribe --bind-to none ./launch.sh train tiny.yaml train.output_dir=asked-$whom $long >out.txt 2>err.txt &
		pid=$!
		wait_for_lines asked-$whom/metrics.jsonl 7
		if [ $whom = mpirun ]; then kill -USR1 $pid; else kill -TERM "$(cat pid.6)"; fi
		wait $pid
		status=$?
		[ $status = 3 ] || problem "$whom: exit status $status: $(head -c 300 err.txt)"
		grep -q "stopped after step" out.txt || problem "$whom: $(tail -n 2 out.txt)"
		[ "$(ls -d asked-$whom/step-* | wc -l)" = 1 ] || problem "$whom: checkpoints: $(ls asked-$whom)"
		continues asked-$whom
	done
}

# SIGTERM to mpirun: it gives the ranks a second to save (odls_base_sigkill_timeout), then kills them. What there is goes on.
test_sigterm() {
	mpirun -n 8 --oversubscribe --bind-to none "$ling" train tiny.yaml train.output_dir=stopped $long checkpoint.every=5 >out.txt 2>err.txt &
	local pid=$! start
	wait_for_lines stopped/metrics.jsonl 7
	start=$SECONDS
	kill -TERM $pid
	wait $pid
	[ $((SECONDS - start)) -le 10 ] || problem "mpirun lived on for $((SECONDS - start)) seconds"
	[ "$(ls -d stopped/step-* | wc -l)" -ge 1 ] || problem "checkpoints: $(ls -A stopped): $(tail -n 3 out.txt; cat err.txt)"
	continues stopped
}

check values micro_batches_of_4 accumulation variants mtp balance_shares blend evaluation every_gradient expert_bias bit_equal bf16 change_of_layout experts_stay all_to_one refused \
	ranks_that_disagree reading_error kill_in_a_step kill_in_a_save signals sigterm
finish
