#!/bin/bash
# Does `ling align` find a bug? Builds copies of ling with one bug each, dumps two training steps of each and of ling as it is, and shows which
# operation `ling align` names. Some five minutes on two cores. Not part of the tests.
#
#   scripts/planted-bugs.sh [NAME...]    these bugs alone; see below
#
# The copies are in build/planted. The exit status is 1 when an operation is named that is not the one with the bug.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
place=$root/build/planted
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader
only=" $* "
status=0

make -s ling
mkdir -p "$place/source"
git ls-files -z -- '*.c' '*.h' '*.html' Makefile | grep -zv ^tests/ | xargs -0 cp --parents -t "$place/source"
cd "$place"
make -s -C source ling "-j$(nproc)"
cp source/ling good
./good tokenize --tokenizer byte --out text "$root/README.md" >/dev/null
cat >run.yaml <<'END'
model:
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 8
  vocab_size: 258
  num_experts: 8
  num_experts_per_tok: 3
  num_shared_experts: 1
  moe_intermediate_size: 16
  use_bias: true
  rope_theta: 1e4
  initializer_range: 0.05
data: { train: text, tokenizer: byte, seq_len: 32 }
train: { output_dir: run, seed: 3, steps: 2, micro_batch: 2, batch: 8 }
schedule: { peak_lr: 1e-2 }
END

# run PROGRAM NAME RANKS KEY=VALUE...: trains two steps, and leaves their dumps in dumps/NAME.
run() {
	local program=$1 name=$2 ranks=$3
	shift 3
	rm -rf "runs/$name" "dumps/$name"
	local command=("./$program" train run.yaml "train.output_dir=runs/$name" 'train.dump.steps=[1, 2]' "train.dump.dir=dumps/$name" "$@")
	[ "$ranks" = 1 ] || command=(mpirun -n "$ranks" --oversubscribe --bind-to none "${command[@]}")
	"${command[@]}" >"$name.log" 2>&1 || { tail -n 5 "$name.log"; exit 1; }
}

run good good 1
printf '%-48s %-36s %s\n' "bug" "where it was run" "what ling align names"

# correct NAME RANKS PROGRAM KEY=VALUE...: what has no bug must agree.
correct() {
	local name=$1
	[[ $only == "  " || $only == *" $name "* ]] || return 0
	run "$3" "$name" "$2" "${@:4}"
	if ./good align dumps/good "dumps/$name" >"$name.txt" 2>&1; then
		printf '%-48s %-36s %s\n' "none: $name" "$2 ranks ${*:4}" "they agree"
	else
		printf '%-48s %-36s %s\n' "none: $name" "$2 ranks ${*:4}" "WRONG: $(grep -m 1 '^first' "$name.txt")"
		status=1
	fi
}

# bug NAME "WHAT" "RANKS [KEY=VALUE...]" FILE PERL "EXPECTED": PERL changes FILE, which is in $_ as a whole. EXPECTED is the operation that must be
# named.
bug() {
	local name=$1 what=$2 where=$3 file=$4 change=$5 expected=$6 found
	[[ $only == "  " || $only == *" $name "* ]] || return 0
	cp "source/$file" before
	perl -0pi -e "$change" "source/$file"
	if cmp -s before "source/$file"; then
		echo "$name: the change does not fit $file any more"
		exit 1
	fi
	make -s -C source ling "-j$(nproc)"
	mv source/ling "$name"
	mv before "source/$file"
	touch "source/$file" # so that its object is made again
	# shellcheck disable=SC2086 # words are meant to split
	run "$name" "$name" $where
	./good align dumps/good "dumps/$name" >"$name.txt" 2>/dev/null || true
	found=$(sed -n 's/^first difference: //p' "$name.txt" | head -n 1)
	if [[ $found == "$expected"* ]]; then
		printf '%-48s %-36s %s\n' "$what" "$where" "$found"
	else
		printf '%-48s %-36s %s\n' "$what" "$where" "WRONG: ${found:-nothing}; expected $expected"
		status=1
	fi
}

layout="parallel.tensor=2 parallel.expert=2"
# shellcheck disable=SC2086
correct layout 4 good $layout
(export LING_PRODUCTS=openblas && correct openblas 1 good)

bug balance "the balance loss has no gradient" 1 ling.c \
	's|c->router.balance_loss_coef / step->num_tokens|0 * c->router.balance_loss_coef|' "layer 1 / router / logits / gradient, step 1"
bug z_loss "the z-loss is scaled by the micro-batch" 1 ling.c \
	's|c->router.z_loss_coef / step->num_tokens|c->router.z_loss_coef / (B * L)|' "layer 1 / router / logits / gradient, step 1"
# dW -= W (dW . W) / n^2, by columns: the gradient of W / n with respect to n too
bug norm_head "NormHead's norm is not detached" 1 ling.c \
	's#(step->accumulate \|\| first > 0\);\n)#$1for (int64_t j = 0; m->head_scale && j < H; j++) {
		double dot = 0, square = 0;
		for (int64_t v = 0; v < V; v++) {
			dot += (double)m->grads.lm_head[v * H + j] * m->params.lm_head[v * H + j];
			square += (double)m->params.lm_head[v * H + j] * m->params.lm_head[v * H + j];
		}
		for (int64_t v = 0; v < V; v++)
			m->grads.lm_head[v * H + j] -= (real)(m->params.lm_head[v * H + j] * dot / square);
	}\n#' "head / logits / gradient of lm_head.weight, step 1"
bug norm_rank "NormHead's norm is local to a rank" "2 parallel.tensor=2" model/weights.c \
	's|all_reduce_sum\(&m->layout.tensor, TRAFFIC_HEAD, norm, H\);||' "head / logits, step 1"
bug router "the router's gradient is counted twice" 1 ling.c \
	's|(matmul_backward_weight\(m->grads.layer\[l\].router, a->dlogits, a->normed, N, H, E, )step->accumulate\);|$&$1true);|' \
	"layer 1 / router / logits / gradient of model.layers.1.mlp.gate.weight, step 1"
bug rope "RoPE rotates pairs (2i, 2i + 1)" 1 kernels.c \
	's|lo\[i\], b = hi\[i\], s = |lo[2 * i], b = lo[2 * i + 1], s = |; s|lo\[i\] = a \* cosine\[i\] - b \* s;\s*hi\[i\]|lo[2 * i] = a * cosine[i] - b * s; lo[2 * i + 1]|;
	s|\*hi = lo \+ d / 2;|*hi = lo; (void)hi;|' "layer 0 / attention / rope, step 1"
bug expert "an expert's gradient is averaged once too often" "4 parallel.expert=2" ling.c \
	's|(m->grads.memory \+ b->offset \+ own_shard\(&m->layout, b, &size\),\s*false\);)|$1
	for (int64_t i = 0; b->sharing == SHARED_BY_EXPERT_DATA && i < b->size; i++)
		m->grads.memory[b->offset + i] /= (real)sharing_group(&m->layout, b->sharing)->size;|' \
	"layer 1 / experts / "
bug eps "AdamW's eps is inside the root" 1 kernels.c \
	's|\(\(real\)sqrt\(v\) \* v_correction \+ eps\)|((real)sqrt(v * v_correction * v_correction + eps))|' \
	"model.word_embeddings.weight / updated, step 1"
bug top_k "the weights of the k experts are not renormalised" 1 ling.c \
	's|c->norm_topk_prob && c->num_experts_per_tok > 1|false|' "layer 0 / router / weights, step 1"
bug bias "a bias is added by every rank" "2 parallel.tensor=2" ling.c \
	's|tensor->rank == 0 \? p->dense_bias : NULL|p->dense_bias|' "layer 0 / attention / output, step 2"
exit $status
