#!/bin/bash
# ling convert-checkpoint as its user meets it, built with sanitizers: round trips, what the converted models compute, what is refused.
. "$(dirname "$0")/check.sh"

head -c 3000 "$root/LICENSE" >text.txt
tiny model.vocab_size=270 model.num_shared_experts=2 data.valid=text train.steps=4 train.batch=4
"$ling" tokenize --out text text.txt >/dev/null && "$ling" train tiny.yaml >/dev/null || exit 1
checkpoint=run/step-0000004

# convert WORDS...: it works, and leaves nothing temporary.
convert() {
	expect 0 "" "$ling" convert-checkpoint "$@"
	[ -z "$(find . -name '*.tmp-*' -o -name '*.lock')" ] || problem "left behind: $(find . -name '*.tmp-*' -o -name '*.lock')"
}

# refuse TEXT SRC [OPTIONS]: an error that holds TEXT, and nothing is made.
refuse() {
	local text=$1
	shift
	expect 1 "$text" "$ling" convert-checkpoint "$1" refused "${@:2}"
	[ ! -e refused ] && ! compgen -G 'refused.*' >/dev/null || problem "made something: $text"
	rm -rf refused
}

loss() { # loss MODEL
	"$ling" eval "$1" --data text --seq-len 16 --json 2>err.txt >out.txt || problem "eval $1: $(cat err.txt)"
	metric loss out.txt
}

close_to() { # close_to A B TOLERANCE WHAT
	awk -v a="$1" -v b="$2" -v t="$3" 'BEGIN { exit !(a > 0 && (a - b < t * a) && (b - a < t * a)) }' || problem "$4: $1 and $2"
}

same_weights() { cmp -s "$1/model.safetensors" "$2/model.safetensors" || problem "the weights of $1 and $2 differ"; }

# rewrite FILE CODE: Perl code that changes the header in $_ of a safetensors file; its length is set right.
rewrite() {
	perl -e 'my ($file, $code) = @ARGV; local $/; open F, "<:raw", $file; my $all = <F>; close F; my $n = unpack "Q<", $all;
		$_ = substr $all, 8, $n; our $data = substr $all, 8 + $n; eval $code; die $@ if $@; open F, ">:raw", $file; print F pack("Q<", length), $_, $data' "$1" "$2"
}

test_directory_and_checkpoint() {
	convert $checkpoint hf
	same_weights hf $checkpoint
	[ "$(loss hf)" = "$(loss $checkpoint)" ] || problem "another loss"
	[ ! -e hf/optimizer.safetensors ] && [ ! -e hf/trainer.json ] || problem "more than the model: $(ls hf)"
	convert hf bf16 --dtype bf16
	grep -q '"torch_dtype": "bfloat16"' bf16/config.json || problem "torch_dtype: $(grep dtype bf16/config.json)"
	[ "$(wc -c <bf16/model.safetensors)" -lt "$(wc -c <hf/model.safetensors)" ] || problem "no smaller in bfloat16"
	close_to "$(loss hf)" "$(loss bf16)" 1e-2 "loss in bfloat16"
	convert bf16 begun/step-0000000 --to checkpoint
	[ "$(loss begun/step-0000000)" = "$(loss bf16)" ] || problem "a checkpoint of bfloat16 has another loss"
	convert begun/step-0000000 bf16-again --dtype bf16
	same_weights bf16 bf16-again
	convert hf f16 --dtype f16 --json
	grep -q '^{"format": "hf", "tensors": 55, "bytes": [0-9]*, "path": "f16"}$' out.txt || problem "--json: $(cat out.txt)"
	close_to "$(loss hf)" "$(loss f16)" 1e-3 "loss in float16"
}

# What a model has beside its weights goes along into the checkpoints of a run that starts from it, and into what is made from them.
test_files_go_along() {
	local file name
	rm -rf m7 r7 && mkdir m7
	cp $checkpoint/config.json $checkpoint/model.safetensors m7
	expect 0 "" "$ling" train-tokenizer --vocab-size 262 --out m7/tokenizer.json text.txt
	sed -i 's/"head_dim"/"eos_token_id": [261, 7], "pad_token_id": 261, "auto_map": {"AutoConfig": "c.C"}, "head_dim"/' m7/config.json
	echo '{"eos_token": "<|endoftext|>"}' >m7/tokenizer_config.json
	echo '{"eos_token_id": 261}' >m7/generation_config.json
	echo '{"pad_token": "<|endoftext|>"}' >m7/special_tokens_map.json
	echo 'class C: pass' >m7/c.py
	echo '{{ messages }}' >m7/chat_template.jinja
	echo 'about m7' >m7/README.md
	expect 0 "" "$ling" tokenize --tokenizer m7 --out own text.txt
	local run="tiny.yaml train.batch=2" own="data.tokenizer=none data.train=own data.valid=own train.init_from=m7"
	expect 0 "" "$ling" train $run $own train.steps=2 train.output_dir=r7 train.stop_at_step=1
	mv m7 moved # a run that continues has it all
	expect 0 "" "$ling" train $run $own train.steps=2 train.output_dir=r7
	mv moved m7
	convert r7/step-0000002 c7
	convert m7 begun7/step-0000000
	convert m7 m7.gguf
	convert r7/step-0000002 r7.gguf
	for file in r7/step-0000001 r7/step-0000002 c7 begun7/step-0000000; do
		for name in tokenizer.json tokenizer_config.json generation_config.json special_tokens_map.json c.py chat_template.jinja; do
			same m7/$name $file/$name
		done
		[ "$(jq -c '[.eos_token_id, .pad_token_id, .auto_map.AutoConfig, .torch_dtype]' $file/config.json)" = '[[261,7],261,"c.C","float32"]' ] ||
			problem "$file: $(cat $file/config.json)"
	done
	[ ! -e r7/step-0000002/README.md ] || problem "the README went along"
	grep -qa tokenizer.chat_template r7.gguf || problem "no chat template in r7.gguf"
	echo >>r7/step-0000002/chat_template.jinja
	expect 1 "chat_template.jinja: " "$ling" train $run $own train.steps=3 train.output_dir=r7 checkpoint.strict=true
	# Ids of another tokenizer are refused; a named one is taken, with a warning where the two differ.
	expect 1 "text: made by tokenizer byte" "$ling" train $run data.tokenizer=none train.init_from=m7 train.steps=2 train.output_dir=r8
	[ ! -e r8/step-0000002 ] || problem "trained on ids of another tokenizer"
	expect 0 "" "$ling" train $run train.init_from=m7 train.steps=2 train.output_dir=r9
	has err.txt "warning: data.tokenizer byte"
	[ ! -e r9/step-0000002/tokenizer.json ] || problem "a checkpoint has a tokenizer that its run did not have"
	[ -e r9/step-0000002/generation_config.json ] || problem "generation_config.json is lost"
	# The byte tokenizer of a checkpoint, too.
	expect 1 "own: made by" "$ling" train $run data.tokenizer=none data.train=own data.valid=own train.init_from=$checkpoint train.steps=2 train.output_dir=r10
	expect 0 "" "$ling" train $run data.tokenizer=none train.init_from=$checkpoint train.steps=2 train.output_dir=r11
	expect 0 "" "$ling" generate r11/step-0000002 --prompt a --max-tokens 1
}

# HF -> GGUF -> HF changes the spelling of the pattern, and neither ids nor the hash; data made before are accepted both ways.
test_tokenizer_stays_itself() {
	rm -rf g7 again7
	convert m7 g7.gguf
	convert g7.gguf again7
	! cmp -s m7/tokenizer.json again7/tokenizer.json || problem "the round trip changes nothing: this tests nothing"
	expect 0 "" "$ling" tokenize --tokenizer again7 --out again text.txt
	same again.bin own.bin
	[ "$(jq .tokenizer_hash own.json)" = "$(jq .tokenizer_hash again.json)" ] || problem "another hash: $(cat own.json again.json)"
	expect 0 "" "$ling" eval again7 --data own --seq-len 16 --max-windows 2
	has out.txt "bits per byte"
	expect 0 "" "$ling" tokenize --decode own --tokenizer again7
}

# eval compares the tokenizers of model and data; bits per byte do not vanish without a word.
test_eval_identity() {
	expect 1 "text.bin: made by tokenizer byte" "$ling" eval m7 --data text --seq-len 16
	[ ! -s out.txt ] || problem "a loss was printed: $(cat out.txt)"
	expect 0 "" "$ling" eval m7 --data own --seq-len 16
	has out.txt "bits per byte"
	[ ! -s err.txt ] || problem "a note: $(cat err.txt)"
	cp out.txt known.txt
	expect 0 "" "$ling" eval m7 --data text --seq-len 16 --tokenizer byte # the user's word
	has out.txt "bits per byte"
	expect 1 "own.bin: made by" "$ling" eval m7 --data own --seq-len 16 --tokenizer byte
	cp own.bin bare.bin
	cp own.idx bare.idx
	expect 0 "" "$ling" eval m7 --data bare --seq-len 16
	has err.txt "note: bare.bin: does not say what made its ids"
	expect 0 "" "$ling" eval m7 --data bare --seq-len 16 --tokenizer m7
	same out.txt known.txt
	rm -rf none7 && mkdir none7 && cp m7/config.json m7/model.safetensors none7
	expect 0 "" "$ling" eval none7 --data own --seq-len 16
	has err.txt "note: own.bin: the model has no tokenizer"
	expect 0 "" "$ling" eval none7 --data own --seq-len 16 --tokenizer m7
	same out.txt known.txt
}

# A run goes on from a converted checkpoint as it begins with train.init_from.
test_training_goes_on() {
	convert bf16 goes-on/step-0000000 --to checkpoint
	expect 0 "" "$ling" train tiny.yaml train.output_dir=goes-on
	grep -q "continuing from goes-on/step-0000000" out.txt || problem "did not continue: $(cat out.txt)"
	! grep -q "not in the checkpoint" out.txt || problem "needless notes: $(cat out.txt)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=begins train.init_from=bf16
	cmp -s <(steady goes-on/metrics.jsonl) <(steady begins/metrics.jsonl) || problem "two runs: $(cat goes-on/metrics.jsonl begins/metrics.jsonl)"
	same_weights goes-on/step-0000004 begins/step-0000004
	convert bf16 other/step-0000000 --to checkpoint
	expect 1 "model.num_experts_per_tok" "$ling" train tiny.yaml train.output_dir=other model.num_experts_per_tok=3
}

test_shards() {
	convert hf shards --max-shard-size 20kB
	[ "$(ls shards/model-*-of-00004.safetensors | wc -l)" = 4 ] || problem "shards: $(ls shards)"
	for shard in shards/model-*.safetensors; do
		[ "$(wc -c <"$shard")" -lt 30000 ] || problem "$shard: $(wc -c <"$shard") bytes"
	done
	[ "$(loss shards)" = "$(loss hf)" ] || problem "another loss in shards"
	convert shards joined
	same_weights hf joined
	expect 2 "--max-shard-size" "$ling" convert-checkpoint hf x.gguf --max-shard-size 20kB
	expect 2 "--max-shard-size 20: expected a size" "$ling" convert-checkpoint hf x --max-shard-size 20
	expect 2 "at most 1000000TB" "$ling" convert-checkpoint hf x --max-shard-size 1000001TB
	expect 2 "--to hg: expected one of hf, checkpoint, gguf" "$ling" convert-checkpoint hf x --to hg
}

test_fold() {
	convert hf folded --fold-norm-head
	grep -q '"norm_head": false' folded/config.json || problem "norm_head: $(grep norm_head folded/config.json)"
	close_to "$(loss hf)" "$(loss folded)" 1e-6 "loss with the NormHead folded"
	refuse "norm_head is off" folded --fold-norm-head
	expect 2 "--fold-norm-head" "$ling" convert-checkpoint hf x/step-0000000 --to checkpoint --fold-norm-head
	expect 2 "--dtype" "$ling" convert-checkpoint hf x/step-0000000 --to checkpoint --dtype bf16
}

test_gguf() {
	convert hf model.gguf --no-tokenizer
	convert model.gguf from-gguf
	same_weights folded from-gguf
	[ "$(loss folded)" = "$(loss from-gguf)" ] || problem "another loss by way of GGUF"
	for type in bf16 f16; do
		convert $type $type.gguf --no-tokenizer
		convert $type.gguf $type-back --dtype $type
		convert $type $type-folded --fold-norm-head
		same_weights $type-folded $type-back
	done
	convert shards second.gguf --no-tokenizer
	cmp -s <(tail -c 50000 model.gguf) <(tail -c 50000 second.gguf) || problem "shards make another GGUF file"
	convert model.gguf renamed --to hf --no-tokenizer
}

# Ling 2.0: what its files become computes the same, with an MTP layer, and without the expert bias where the config says that there is none.
test_ling2() {
	local v2=(num_hidden_layers=2 hidden_size=32 num_attention_heads=4 num_key_value_heads=2 head_dim=8 num_experts=8 num_experts_per_tok=2 n_group=4
		topk_group=2 moe_intermediate_size=8 intermediate_size=24 vocab_size=600 initializer_range=0.3)
	"$root/scripts/make-random-ling" --v2 v2 "${v2[@]}" num_nextn_predict_layers=1 >/dev/null
	convert v2 v2-same
	convert v2-same v2-run/step-0000000 --to checkpoint
	convert v2-run/step-0000000 v2-bf16 --dtype bf16
	same_weights v2-same v2-bf16
	convert v2 v2.gguf --no-tokenizer
	convert v2.gguf v2-gguf --dtype bf16
	same_weights v2-same v2-gguf
	for dir in v2-same v2-run/step-0000000 v2-gguf; do
		[ "$(loss $dir)" = "$(loss v2)" ] || problem "$dir: another loss"
	done
	[ "$(jq -c '[.architectures[0], .model_type, .num_nextn_predict_layers, .partial_rotary_factor]' v2-gguf/config.json)" = \
		'["BailingMoeV2ForCausalLM","bailing_moe",1,0.5]' ] || problem "$(cat v2-gguf/config.json)"
	"$root/scripts/make-random-ling" --v2 unbiased "${v2[@]}" moe_router_enable_expert_bias=0 >/dev/null
	convert unbiased zeros
	[ "$(loss unbiased)" = "$(loss zeros)" ] || problem "zeros are another bias than none"
	sed -i 's/"moe_router_enable_expert_bias": false/"moe_router_enable_expert_bias": true/' unbiased/config.json
	refuse "model.layers.1.mlp.gate.expert_bias is missing" unbiased
	expect 1 "model.layers.1.mlp.gate.expert_bias is missing" "$ling" eval unbiased --data text --seq-len 16
	# A bias that is NaN or infinite would change the choice of experts, and no loss would show it.
	rm -rf nan && cp -r v2 nan
	perl -0777 -pi -e 'my $n = unpack "Q<"; /"model.layers.1.mlp.gate.expert_bias":.*?"data_offsets": *\[(\d+)/s or die;
		substr($_, 8 + $n + $1 + 12, 4) = pack "V", 0x7fc00000' nan/model.safetensors
	expect 1 "nan: tensor model.layers.1.mlp.gate.expert_bias has nan at row 3" "$ling" eval nan --data text --seq-len 16
	expect 1 "nan: tensor model.layers.1.mlp.gate.expert_bias has nan at row 3" "$ling" generate nan --tokenizer byte --prompt x
	# a form that only conversion reads; here half of one
	rm -rf split && cp -r v2-same split
	rewrite split/model.safetensors 's/model.layers.1.attention.query_key_value/model.layers.1.attention.q_proj/g'
	expect 1 "query_key_value.weight is missing; other programs' forms of it, which are there, become this one by ling convert" \
		"$ling" eval split --data text --seq-len 16
	refuse "model.layers.1.attention.q_proj.weight: shape [64, 32]; expected [32, 32]" split
	# its chat form, by its template; a reply ends with <|role_end|>
	expect 0 "" "$ling" train-tokenizer --vocab-size 280 --special '<|role_end|>' --out v2/tokenizer.json text.txt
	echo '{"eos_token": "<|role_end|>"}' >v2/tokenizer_config.json
	cat >v2/chat_template.jinja <<-'END'
		{% set thinking_option = 'off' %}
		{{- '<role>SYSTEM</role>' }}
		{%- if messages[0].role == 'system' %}
		    {{- messages[0].content + '\n' }}
		{%- endif %}
		{{- 'detailed thinking ' + thinking_option + '<|role_end|>' }}
		{%- for message in messages %}
		    {%- if message.role == "user" %}
		        {{- '<role>HUMAN</role>' + message.content + '<|role_end|>' }}
		    {%- elif message.role == "assistant" %}
		        {{- '<role>ASSISTANT</role>' + message.content + '<|role_end|>' }}
		    {%- endif %}
		{%- endfor %}
		{%- if add_generation_prompt %}
		    {{- '<role>ASSISTANT</role>' }}
		{%- endif %}
	END
	expect 0 "" "$ling" generate v2 --prompt hello --chat --max-tokens 4 --json
	echo '{"messages": [{"role": "user", "content": "hello"}]}' >v2.jsonl
	cp out.txt by-template.txt
	expect 0 "" "$ling" generate v2 --prompts v2.jsonl --chat-form ling2 --max-tokens 4 --json
	same out.txt by-template.txt
	echo hello >hello.txt
	expect 0 "" "$ling" chat v2 --max-tokens 4 <hello.txt
	convert v2 v2-chat.gguf
	convert v2-chat.gguf v2-chat
	expect 0 "" "$ling" generate v2-chat --prompt hello --chat --max-tokens 4 --json
	same out.txt by-template.txt
}

# What Hugging Face's configs say in other ways, and keys of others, which stay.
test_config() {
	for change in 's/"head_dim": 6/"head_dim": null/' 's/"head_dim": 6/"head_dim": 0/' '/"head_dim"/d'; do
		rm -rf dim dim2 && "$ling" train tiny.yaml train.output_dir=dim model.head_dim=off train.stop_at_step=1 >/dev/null
		convert dim/step-0000001 dim2
		sed -i "s/\"head_dim\": 4/\"head_dim\": 6/; $change" dim2/config.json
		rm -rf dim3 && convert dim2 dim3
		grep -q '"head_dim": 4' dim3/config.json || problem "$change: $(grep head_dim dim3/config.json)"
		[ "$(loss dim2)" = "$(loss dim3)" ] || problem "$change: another loss"
	done
	cp -r hf spelt
	sed -i 's/"num_experts"/"n_routed_experts"/; s/"num_shared_experts"/"n_shared_experts"/; s/"use_cache"/"auto_map": {"AutoConfig": "a.B"}, "eos_token_id": 9, "use_cache"/' spelt/config.json
	echo '{"eos_token": "e"}' >spelt/tokenizer_config.json
	echo 'x' >spelt/modeling_bailing_moe.py
	convert spelt spelt2
	grep -q '"num_experts": 6' spelt2/config.json && ! grep -q 'n_routed\|n_shared' spelt2/config.json || problem "$(cat spelt2/config.json)"
	grep -q '"AutoConfig": "a.B"' spelt2/config.json && grep -q '"eos_token_id": 9' spelt2/config.json || problem "$(cat spelt2/config.json)"
	cmp -s spelt/tokenizer_config.json spelt2/tokenizer_config.json && [ -f spelt2/modeling_bailing_moe.py ] || problem "files: $(ls spelt2)"
	same_weights spelt spelt2
	"$ling" info spelt2 >/dev/null || problem "info"
	sed -i 's/bailing_moe"/llama"/' spelt/config.json
	refuse "model_type" spelt
}

# Folders may have names that are not UTF-8; a GGUF file, whose strings are UTF-8, can be read again.
test_paths() {
	local odd
	odd=$(not_utf8 odd)
	convert $checkpoint "$odd/hf"
	json "$odd/hf/config.json"
	convert "$odd/hf" "$odd/model.gguf" --no-tokenizer
	convert "$odd/hf" "$odd/model$(printf '\351').gguf" --no-tokenizer
	convert "$odd/model$(printf '\351').gguf" "$odd/back"
	[ "$(loss "$odd/back")" = "$(loss folded)" ] || problem "another loss by way of GGUF"
	convert "$odd/hf" "$odd/begun/step-0000000" --to checkpoint --json
	json out.txt
	json "$odd/begun/step-0000000/trainer.json"
	same_weights "$odd/begun/step-0000000" hf
}

# Buffers of old files are known and left out, also by eval.
test_buffers() {
	cp -r hf buffers
	rewrite buffers/model.safetensors '$data .= "\0" x 12; my $n = length($data) - 12; my $e = $n + 12;
		s/}\s*$/,"model.layers.0.attention.rotary_emb.inv_freq":{"dtype":"F32","shape":[3],"data_offsets":[$n,$e]}}/'
	convert buffers unbuffered
	grep -q "note:.* 1 rotary_emb.inv_freq" err.txt || problem "no note: $(cat err.txt)"
	same_weights hf unbuffered
	[ "$(loss buffers)" = "$(loss hf)" ] || problem "eval with a buffer"
	cp -r hf foreign
	rewrite foreign/model.safetensors '$data .= "\0" x 12; my $n = length($data) - 12; my $e = $n + 12;
		s/}\s*$/,"model.layers.0.attention.rotary.inv_freq":{"dtype":"F32","shape":[3],"data_offsets":[$n,$e]}}/'
	refuse "model.layers.0.attention.rotary.inv_freq is not a part of the model" foreign
}

test_refused_sources() {
	# of a repository that was fetched without Git LFS
	rm -rf lfs && cp -r $checkpoint lfs && rm lfs/trainer.json
	printf 'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n' >lfs/model.safetensors
	expect 1 "lfs/model.safetensors: is a pointer of Git LFS to a file, which git lfs pull gets" "$ling" convert-checkpoint lfs refused
	cp lfs/model.safetensors pointer.json && cp lfs/model.safetensors pointer.gguf
	expect 1 "pointer.json: is a pointer of Git LFS" "$ling" generate $checkpoint --tokenizer pointer.json --prompt a
	expect 1 "pointer.gguf: is a pointer of Git LFS" "$ling" convert-checkpoint pointer.gguf refused
	expect 1 "hf: is there already" "$ling" convert-checkpoint $checkpoint hf
	refuse "nothere: cannot open" nothere
	mkdir held && touch held/metrics.jsonl && refuse "is the directory of a run" held
	refuse "no GGUF file" tiny.yaml
	expect 1 "expected RUN/step-0000000" "$ling" convert-checkpoint hf x --to checkpoint
	refuse "tokenizer.json: is not there" hf --to gguf
	expect 2 "--to pth" "$ling" convert-checkpoint hf x --to pth
	expect 2 "--dtype q4" "$ling" convert-checkpoint hf x --dtype q4
	expect 2 "too few" "$ling" convert-checkpoint hf
	rm -rf broken && cp -r shards broken && rm broken/model-00003-of-00004.safetensors
	refuse "model-00003-of-00004.safetensors: is not there, but" broken
	rm -rf broken && cp -r shards broken && truncate -s -1 broken/model-00002-of-00004.safetensors
	refuse "model-00002-of-00004.safetensors: tensor" broken
	rm -rf broken && cp -r shards broken && sed -i 's/"model.norm.weight": "model-0000[0-9]/"model.norm.weight": "model-00001/' broken/model.safetensors.index.json
	refuse "model.norm.weight" broken
	rm -rf broken && cp -r shards broken && sed -i 's/"weight_map": {/"weight_map": {"model.extra": "model-00001-of-00004.safetensors",/' broken/model.safetensors.index.json
	refuse "tensor model.extra is missing, but" broken
	rm -rf broken && cp -r hf broken && sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' broken/config.json
	refuse "is not a part of the model" broken
	rm -rf broken && cp -r hf broken && sed -i 's/"num_experts": 6/"num_experts": 7/' broken/config.json
	refuse "shape [6, 16]; expected [7, 16]" broken
	rm -rf broken && cp -r hf broken && sed -i 's/"tie_word_embeddings": false/"tie_word_embeddings": true/' broken/config.json
	refuse "tie_word_embeddings is true, but lm_head.weight is there and differs" broken
	rm -rf broken && cp -r hf broken && rewrite broken/model.safetensors 's/"lm_head.weight"/"lm_headd.weight"/g'
	refuse "tensor lm_head.weight is missing" broken
	rm -rf broken && cp -r $checkpoint broken && printf '\1' | dd of=broken/model.safetensors bs=1 seek=$(($(wc -c <broken/model.safetensors) - 40)) conv=notrunc 2>/dev/null
	refuse "is damaged" broken
	rm -rf broken && cp -r $checkpoint broken && sed -i 's/"rope_theta": 10000.0/"rope_theta": 20000.0/' broken/config.json
	refuse "was changed after it was saved" broken
	rm -rf broken && cp -r $checkpoint broken && truncate -s -30 broken/optimizer.safetensors
	refuse "optimizer.safetensors" broken
	for key in use_bias use_qkv_bias; do
		rm -rf biased && "$ling" train tiny.yaml train.output_dir=biased model.$key=true train.stop_at_step=1 >/dev/null
		refuse "no place for model.layers.0.attention" biased/step-0000001 --to gguf --no-tokenizer
		rm -rf biased2 && convert biased/step-0000001 biased2
		same_weights biased2 biased/step-0000001
	done
	truncate -s -1 model.gguf
	refuse "the file is truncated" model.gguf
}

test_full_disk() {
	for target in full full.gguf full/step-0000000; do
		rm -rf full
		(ulimit -f 20 && trap '' XFSZ && exec "$ling" convert-checkpoint hf $target --no-tokenizer --to "$(case $target in *.gguf) echo gguf ;; */*) echo checkpoint ;; *) echo hf ;; esac)") >out.txt 2>err.txt
		[ $? = 1 ] || problem "$target: exit status $?"
		grep -q "cannot write" err.txt || problem "$target: $(cat err.txt)"
		[ ! -e $target ] && [ -z "$(find . -name '*.tmp-*' -o -name '*.lock')" ] || problem "$target: left something behind"
	done
}

check directory_and_checkpoint training_goes_on shards fold gguf ling2 paths config buffers refused_sources full_disk files_go_along tokenizer_stays_itself eval_identity
finish
