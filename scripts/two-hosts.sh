#!/bin/bash
# Measures what training costs over a slow link between two hosts: tokens a second, and bytes over the link for each token, of training in step
# (parallel.sync=step) in some layouts, gradients and weights sent in f32 and bf16, and of local SGD with a replica on each host. The hosts are
# two network namespaces of this machine, joined by a veth pair whose both ends tc slows down; mpirun starts two ranks on each. Needs root, ip,
# tc (Debian: iproute2) and jq.
#
#   scripts/two-hosts.sh [--help]
#
# RATE      of the link, as tc writes it (1gbit); 100mbit is a slower one
# PERIOD    local.steps of local SGD (16)
# MEASURED  steps of training in step that are measured (8), after two that are not; of local SGD it is one period, after one that is not, with
#           the synchronisation between them
# CASES     some of: f32 bf16 expert-f32 expert-bf16 tensor-f32 tensor-bf16 local local-expert (all)
#
# Ranks of a host talk through shared memory, and those of different hosts by TCP; all share the cores of this machine. In expert and tensor the
# two ranks of a host share experts or heads; in local-expert, too. Bytes are those that the link's two ends have counted as sent, TCP's headers
# and acknowledgements included. Two or three minutes on two cores with 1gbit; five with 100mbit and MEASURED=3. Everything is left in build/two-hosts.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0"; [ "$*" = --help ] && exit; exit 2; }
[ "$(id -u)" = 0 ] || { echo "$0: network namespaces need root" >&2; exit 1; }
rate=${RATE:-1gbit}
period=${PERIOD:-16}
measured=${MEASURED:-8}
out=$PWD/build/two-hosts
rm -rf "$out" && mkdir -p "$out"
make -s ling
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none

# Hosts ling-a, 10.99.0.1, and ling-b, 10.99.0.2, each with its own name. The agent is what mpirun calls in place of ssh: AGENT HOST COMMAND.
mpirun=
cleanup() {
	[ -z "$mpirun" ] || kill "$mpirun" 2>/dev/null || true
	wait
	ip netns del ling-a 2>/dev/null || true
	ip netns del ling-b 2>/dev/null || true
}
trap cleanup EXIT
trap 'exit 130' INT TERM
ip netns add ling-a
ip netns add ling-b
ip -n ling-a link add link0 type veth peer name link0 netns ling-b
ip -n ling-a address add 10.99.0.1/24 dev link0
ip -n ling-b address add 10.99.0.2/24 dev link0
for host in a b; do
	ip -n ling-$host link set lo up
	ip -n ling-$host link set link0 up
	tc -n ling-$host qdisc add dev link0 root tbf rate "$rate" burst 256kb latency 50ms
done
cat >"$out/agent" <<'AGENT'
#!/bin/sh
case $1 in 10.99.0.1) host=ling-a ;; *) host=ling-b ;; esac
shift
exec ip netns exec $host unshare --uts sh -c "hostname $host && $*"
AGENT
chmod +x "$out/agent"

./ling tokenize --out "$out/text" docs/*.md >/dev/null
cat >"$out/config.yaml" <<YAML
model:
  hidden_size: 256
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  vocab_size: 257
  num_experts: 32
  num_experts_per_tok: 2
  num_shared_experts: 1
  moe_intermediate_size: 128
data: { train: $out/text, tokenizer: byte, seq_len: 128, shuffle: true }
train: { steps: 1000, micro_batch: 2, batch: 8 }
schedule: { peak_lr: 1e-3 }
checkpoint: { every: off }
spikes: { action: off }
YAML

# What both ends of the link have sent, in bytes.
sent() {
	local n=0 host
	for host in a b; do
		n=$((n + $(ip netns exec ling-$host cat /sys/class/net/link0/statistics/tx_bytes)))
	done
	echo $n
}
# reach STEP: waits until metrics.jsonl has so many lines.
reach() {
	until [ "$(cat "$run/metrics.jsonl" 2>/dev/null | wc -l)" -ge "$1" ]; do
		kill -0 "$mpirun" 2>/dev/null || { cat "$out/log"; exit 1; }
		sleep 0.02
	done
	date +%s.%N
	sent
}

# measure NAME FIRST STEPS KEYS...: trains until the steps after the first ones are measured, and prints a line.
measure() {
	local name=$1 first=$2 steps=$3 begin end tokens
	shift 3
	run=$out/$name
	# shellcheck disable=SC2016 # the agent's shell expands
	"$out/agent" 10.99.0.1 exec mpirun --host 10.99.0.1:2,10.99.0.2:2 -n 4 --bind-to none --mca mpi_yield_when_idle 1 \
		--mca plm_rsh_agent "$out/agent" --mca oob_tcp_if_include link0 --mca btl self,vader,tcp --mca btl_tcp_if_include link0 --mca pml ob1 \
		-x OMP_NUM_THREADS "$PWD/ling" train "$out/config.yaml" train.output_dir="$run" "$@" train.steps=$((first + steps + 1)) >"$out/log" 2>&1 &
	mpirun=$!
	mapfile -t begin < <(reach "$first")
	mapfile -t end < <(reach $((first + steps)))
	wait $mpirun || { cat "$out/log"; exit 1; }
	mpirun=
	tokens=$((steps * 8 * 128))
	awk "BEGIN { t = ${end[0]} - ${begin[0]}; printf \"%-14s %6d %10.1f %14.1f %16.1f\\n\", \"$name\", $steps, t, $tokens / t, (${end[1]} - ${begin[1]}) / $tokens }"
}

echo "$(./ling info "$out/config.yaml" --json | jq .parameters) parameters, 1024 tokens a step; 2 hosts of 2 ranks, a link of $rate"
printf '%-14s %6s %10s %14s %16s\n' case steps seconds "tokens/s" "bytes a token"
for case in ${CASES:-f32 bf16 expert-f32 expert-bf16 tensor-f32 tensor-bf16 local local-expert}; do
	keys=()
	case $case in *expert*) keys+=(parallel.expert=2) ;; *tensor*) keys+=(parallel.tensor=2) ;; esac
	case $case in
	local*) measure "$case" "$period" "$period" parallel.sync=local local.ranks=2 local.steps="$period" "${keys[@]}" ;;
	*) measure "$case" 2 "$measured" parallel.reduce="${case##*-}" "${keys[@]}" ;;
	esac
done
