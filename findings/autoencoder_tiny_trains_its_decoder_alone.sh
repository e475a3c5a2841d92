#!/usr/bin/env bash
# diffusers 0.42.1: AutoencoderTiny's forward rounds its latents to bytes between encoder and decoder, in training too. So no gradient
# comes back through them: a loop over `model(images).sample`, which trains AutoencoderKL whole, trains the decoder of this one and
# leaves each weight of the encoder as it was, without a word, while the loss goes down. `model.decode(model.encode(images).latents)`
# trains both. The class says nothing of it; its code calls the rounding a way to imitate latents that are kept as bytes.
# Fails if diffusers does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy diffusers==0.42.1
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import diffusers
import torch

print("diffusers", diffusers.__version__, "torch", torch.__version__)
kinds = {
    "AutoencoderKL": lambda: diffusers.AutoencoderKL(block_out_channels=(32,)),
    "AutoencoderTiny": lambda: diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)
    ),
}
ways = {
    "model(images)": lambda model, images: model(images).sample,
    "decode(encode(images))": lambda model, images: model.decode(model.encode(images).latents).sample,
}


def moved(kind, way):
    """The first and last loss, and the share of the encoder's and of the decoder's weights that twenty steps changed."""
    torch.manual_seed(0)
    model, images = kinds[kind]().train(), torch.rand(4, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for _ in range(20):
        loss = (ways[way](model, images) - images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    changed = {name: not torch.equal(p, old) for (name, p), old in zip(model.named_parameters(), before)}
    parts = ([c for name, c in changed.items() if name.startswith(part)] for part in ("encoder", "decoder"))
    return losses[0], losses[-1], *(sum(part) / len(part) for part in parts)


for kind, way in (("AutoencoderKL", "model(images)"), ("AutoencoderTiny", "model(images)"), ("AutoencoderTiny", "decode(encode(images))")):
    first, last, encoder, decoder = moved(kind, way)
    print(f"{kind}, {way}: loss {first:.4f} to {last:.4f}; changed: {encoder:.0%} of the encoder's weights, {decoder:.0%} of the decoder's")
    assert last < first and decoder > 0.5
    assert encoder == 0 if (kind, way) == ("AutoencoderTiny", "model(images)") else encoder > 0.5
PY
