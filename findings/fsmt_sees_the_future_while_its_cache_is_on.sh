#!/usr/bin/env bash
# transformers 5.24.0: FSMT makes its decoder's causal mask and padding mask only where no key cache is asked for, and its
# configuration asks for one by default. With labels the model turns the cache off by itself; a loop with a loss of its own on
# `model(input_ids=..., decoder_input_ids=...).logits` trains a decoder that sees the token that it is to predict. BART, of which
# it is a port, does not. use_cache=False is the cure. Fails if transformers does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy transformers==5.24.0
cat > "$folder/look.py" <<'PY'
import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration, FSMTConfig, FSMTForConditionalGeneration

transformers.logging.set_verbosity_error()
small = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
small |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
torch.manual_seed(0)
fsmt = FSMTForConditionalGeneration(FSMTConfig(langs=["en", "de"], src_vocab_size=99, tgt_vocab_size=99, **small)).eval()
bart = BartForConditionalGeneration(BartConfig(vocab_size=99, **small)).eval()
source, target = torch.randint(5, 99, (2, 12)), torch.randint(5, 99, (2, 8))
other = torch.cat([target[:, :-1], target[:, -1:] % 90 + 5], 1)
assert (target[:, -1] != other[:, -1]).all()


def first_logits_follow_the_last_token(model, **options):
    with torch.no_grad():
        one, two = (model(input_ids=source, decoder_input_ids=ids, **options).logits[:, 0] for ids in (target, other))
    return bool((one - two).abs().max() > 1e-4)


found = {
    "FSMT": first_logits_follow_the_last_token(fsmt),
    "FSMT, use_cache=False": first_logits_follow_the_last_token(fsmt, use_cache=False),
    "BART": first_logits_follow_the_last_token(bart),
}
print(f"transformers {transformers.__version__}: do the first position's logits follow the last token? {found}")
assert found == {"FSMT": True, "FSMT, use_cache=False": False, "BART": False}
PY
"$folder/env/bin/python" "$folder/look.py"
