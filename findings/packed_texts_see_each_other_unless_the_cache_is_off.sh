#!/usr/bin/env bash
# transformers 5.24.0: position_ids that begin anew with each of several texts in a row are to keep the texts apart ("packed
# sequences"), with eager and sdpa attention too. In training mode that holds only with use_cache=False: with True, the default of
# every configuration, the model makes an empty key cache for the forward pass, and with a cache the mask is left out. No warning is
# given, and the loss is that of one long text. transformers' own Trainer turns the cache off; a loop of one's own does not.
# Fails if transformers does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy transformers==5.24.0
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch
import transformers

print("transformers", transformers.__version__)
texts = [torch.arange(1, 6), torch.arange(20, 29), torch.arange(40, 42)]
row = torch.cat(texts)[None]
positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
for kind in ("Llama", "Qwen3", "Mistral", "Gemma"):
    for attention in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        )
        config._attn_implementation = attention
        model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
        apart = torch.cat([model(input_ids=text[None]).logits[0] for text in texts])
        off = {}
        for use_cache in (config.use_cache, False):
            found = model(input_ids=row, position_ids=positions, use_cache=use_cache).logits[0]
            off[use_cache] = float((found - apart).abs().max())
        print(f"{kind}, {attention}: logits differ from those of the texts alone by " + ", ".join(
            f"{difference:.2g} with use_cache={use_cache}" for use_cache, difference in off.items()
        ))
        assert off[True] > 1e-2 and off[False] < 1e-5
PY
