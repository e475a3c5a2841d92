"""A model that is cut at its layers does what it did whole: outputs, gradients, names, in training and in evaluation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import ModelError
from seqpart.tracing.tracing import chain_of, trace
from tests.whole_models import Bands, Decoder, Dense, Layer, UNet

ROWS = 3


def replayed(chain, rows, *, training):
    """The output of the blocks one after the other, and the most values that are there between two of them."""
    values, last = {0: rows}, {n: block.number for block in chain for n in block.takes}
    widest = 0
    for block in chain:
        block.alive.train(training)
        given = block.alive(*(values[number] for number in block.takes))
        assert isinstance(given, tuple)
        values.update(zip(block.gives, given, strict=True))
        widest = max(widest, sum(last.get(number, len(chain)) > block.number for number in values))
    (output,) = chain[-1].gives
    return values[output], widest


def output_of(model, rows):
    name = getattr(model, "main_input_name", None)
    found = model(**{name: rows}) if name else model(rows)
    if isinstance(found, torch.Tensor):
        return found
    return next(found[key] for key in ("logits", "out", "last_hidden_state") if key in found)


def run(model, forward):
    """(output, gradients by name) from one seed; running statistics are what they were."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.zero_grad()
    torch.manual_seed(1)
    output = forward()
    if output.requires_grad:
        output.float().pow(2).sum().backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.load_state_dict(before)
    return output.detach(), gradients


def assert_same_as_whole(model, rows, blocks=None, widest=None):
    modes = [module.training for module in model.modules()]
    chain = trace(model, tuple(rows.shape[1:]), rows.dtype)
    assert [module.training for module in model.modules()] == modes
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            expected, gradients = run(model, lambda: output_of(model, rows))
            found, theirs = run(model, lambda training=training: replayed(chain, rows, training=training)[0])
        assert torch.equal(found, expected)
        for name in gradients if training else ():
            assert (gradients[name] is None) == (theirs[name] is None), name
            # Kernels round otherwise where memory lies otherwise: the bits are those of runs under a limit, see test_packs.
            assert gradients[name] is None or torch.allclose(theirs[name], gradients[name], rtol=1e-4, atol=1e-6), name
    named = {block.exported(name) for block in chain for name in block.alive.state_dict()} | set(chain.aliases)
    assert named == set(model.state_dict())
    assert blocks is None or len(chain) == blocks
    assert widest is None or replayed(chain, rows, training=False)[1] == widest


def images(size=32, channels=3):
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(2))


def tokens(length=12, words=11):
    return torch.randint(0, words, (ROWS, length), generator=torch.Generator().manual_seed(2))


def quantities(width=4):
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2))


class Start(nn.Module):
    """A row of its own before the others, expanded to the batch, and positions that are added."""

    def __init__(self):
        super().__init__()
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x.reshape(x.size(0), 4, 8)], 1) + self.places
        with torch.no_grad():
            shift = x.mean(0, keepdim=True)
        for layer in self.layers:
            x = layer(x - shift)
        return self.head(x[:, 0])


class InPlace(nn.Module):
    """A value is changed in place by a layer, and the name that it had before is used again."""

    def __init__(self):
        super().__init__()
        self.one, self.act, self.two, self.three = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.one(x)
        kept, row = x, x[:, 1:]
        self.act(x)
        x = self.two(kept)
        return self.three(x + kept + row.sum(1, keepdim=True))


class Spare(nn.Module):
    """A part that no call needs, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again = self.used
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.head(F.relu(self.again(x)) * self.count)


class Modes(nn.Module):
    """It drops by hand, and only in training."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.one(x)
        if self.training:
            x = x * (torch.rand(x.shape[0], 1, device=x.device) > 0.3)
        return self.two(x)


OURS = {
    "unet": (UNet, lambda: images(8, 1), 6, 3),
    "decoder": (Decoder, tokens, None, None),
    "dense": (Dense, quantities, 5, 6),
    "bands": (Bands, quantities, 6, 2),
    "a row of its own": (Start, lambda: quantities(32), None, None),
    "in place": (InPlace, quantities, 4, 3),
    "spare parts": (Spare, quantities, 2, None),
    "modes": (Modes, quantities, 2, 1),
}


@pytest.mark.parametrize(("kind", "rows", "blocks", "widest"), OURS.values(), ids=OURS)
def test_a_model_does_in_blocks_what_it_does_whole(kind, rows, blocks, widest):
    torch.manual_seed(0)
    assert_same_as_whole(kind(), rows(), blocks, widest)


def torchvision_model(name, **options):
    models = pytest.importorskip("torchvision.models")
    return models.get_model(name, weights=None, num_classes=5, **options)


def timm_model(name):
    timm = pytest.importorskip("timm", reason="timm is not installed: seqpart[hf]")
    return timm.create_model(name, num_classes=5)


def transformers_model(name, config, **options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: seqpart[hf]")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}
    return getattr(transformers, name)(getattr(transformers, config)(**small | options, pad_token_id=0))


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SEEN = {"image_size": 32, "patch_size": 8}
THEIRS = {
    "resnet18": (lambda: torchvision_model("resnet18"), images),
    "mobilenet_v3_small": (lambda: torchvision_model("mobilenet_v3_small"), images),
    "convnext_atto": (lambda: timm_model("convnext_atto"), images),
    "gpt2": (lambda: transformers_model("GPT2LMHeadModel", "GPT2Config", **GPT2), tokens),
    "llama": (lambda: transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED), tokens),
    "llama, tied": (lambda: transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True), tokens),
    "bert": (lambda: transformers_model("BertForSequenceClassification", "BertConfig"), tokens),
    "vit": (lambda: transformers_model("ViTForImageClassification", "ViTConfig", **SEEN), images),
    "t5 encoder": (
        lambda: transformers_model("T5EncoderModel", "T5Config", d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8),
        tokens,
    ),
}
FURTHER = {
    "densenet121": (lambda: torchvision_model("densenet121"), images),
    "swin_t": (lambda: torchvision_model("swin_t"), images),
    "efficientnet_b0": (lambda: torchvision_model("efficientnet_b0"), images),
    "vgg11": (lambda: torchvision_model("vgg11"), images),
    "squeezenet": (lambda: torchvision_model("squeezenet1_1"), lambda: images(64)),
    "shufflenet": (lambda: torchvision_model("shufflenet_v2_x0_5"), images),
    "regnet": (lambda: torchvision_model("regnet_y_400mf"), images),
    "deeplab": (lambda: torchvision_model("deeplabv3_mobilenet_v3_large", weights_backbone=None), images),
    "r3d_18": (lambda: torchvision_model("r3d_18"), lambda: images(16)[:, :, None].repeat(1, 1, 4, 1, 1)),
    "vit_tiny": (lambda: timm_model("vit_tiny_patch16_224"), lambda: images(224)),
    "eva02_tiny": (lambda: timm_model("eva02_tiny_patch14_224"), lambda: images(224)),
    "efficientnet of timm": (lambda: timm_model("efficientnet_b0"), lambda: images(64)),
    "regnety_002": (lambda: timm_model("regnety_002"), images),
    "xcit": (lambda: timm_model("xcit_nano_12_p16_224"), lambda: images(224)),
    "coat_tiny": (lambda: timm_model("coat_tiny"), lambda: images(224)),
    "levit": (lambda: timm_model("levit_128s"), lambda: images(224)),
    "mobilevit": (lambda: timm_model("mobilevit_xxs"), lambda: images(64)),
    "qwen3": (lambda: transformers_model("Qwen3ForCausalLM", "Qwen3Config", **GROUPED), tokens),
    "qwen3, mixture": (
        lambda: transformers_model(
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        ),
        tokens,
    ),
    "gemma2": (lambda: transformers_model("Gemma2ForCausalLM", "Gemma2Config", **GROUPED), tokens),
    "gemma3": (lambda: transformers_model("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED), tokens),
    "mistral": (lambda: transformers_model("MistralForCausalLM", "MistralConfig", num_key_value_heads=2), tokens),
    "phi": (lambda: transformers_model("PhiForCausalLM", "PhiConfig"), tokens),
    "gpt-neox": (lambda: transformers_model("GPTNeoXForCausalLM", "GPTNeoXConfig"), tokens),
    "roberta": (lambda: transformers_model("RobertaForSequenceClassification", "RobertaConfig"), tokens),
    "mamba": (lambda: transformers_model("MambaForCausalLM", "MambaConfig", state_size=4), tokens),
    "siglip": (lambda: transformers_model("SiglipVisionModel", "SiglipVisionConfig", **SEEN), images),
    "deberta": (lambda: transformers_model("DebertaV2ForSequenceClassification", "DebertaV2Config"), tokens),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "rows"),
    [*THEIRS.values(), *(pytest.param(*how, marks=pytest.mark.slow) for how in FURTHER.values())],
    ids=[*THEIRS, *FURTHER],
)
def test_models_of_others_do_in_blocks_what_they_do_whole(make, rows):
    torch.manual_seed(0)
    assert_same_as_whole(make(), rows())


def test_layers_that_are_alike_are_told_to_be_so():
    chain = trace(
        transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED | {"num_hidden_layers": 6}), (12,), torch.int64
    )
    assert len({block.same_as for block in chain}) == len(chain) - 4, "the first takes them in another order"
    assert len({block.name for block in chain}) == len(chain)


def test_a_model_keeps_its_weights_its_cache_and_its_memory():
    model = transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(model, (12,), torch.int64)
    assert model.config.use_cache
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {p.data_ptr() for p in model.parameters()} == {t.data_ptr() for t in dict(model.named_parameters()).values()}


def test_lists_of_blocks_stay_what_they_are():
    blocks = [nn.Linear(4, 4), nn.ReLU()]
    assert [block.alive for block in chain_of(blocks, (4,), torch.float32)] == blocks
    assert [block.alive for block in chain_of(nn.Sequential(*blocks), (4,), torch.float32)] == blocks


class Looks(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.one, self.two, self._look = nn.Linear(4, 4), nn.Linear(4, 3), look

    def forward(self, x):
        return self._look(self, self.one(x))


def number_of_a_tensor(self, x):
    return self.two(x) if x.sum() > 0 else self.two(-x)


def many_outputs(self, x):
    return self.two(x), x


def named_outputs(self, x):
    return {"depth": self.two(x), "edges": x}


def other_calls_for_other_rows(self, x):
    return self.two(x) if len(x) < 5 else self.two(self.one(x))


def hidden_in_an_object(self, x):
    class Held:
        tensor = x

    return self.two(torch.nn.functional.linear(x, self.two.weight, Held()))


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (number_of_a_tensor, r"reads a number out of a tensor.*the model \(Looks, .*test_tracing\.py:\d+\)"),
        (many_outputs, "Looks returned a tuple, of 2 tensors, and which of them is to be judged is not known"),
        (named_outputs, "Looks returned a dict with depth, edges, of 2 tensors"),
        (other_calls_for_other_rows, "does other things with 6 rows than with 4"),
        (hidden_in_an_object, r"the model cannot be cut into blocks: linear\(\): argument 'bias'"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_place(look, said):
    with pytest.raises(ModelError, match=said):
        trace(Looks(look), (4,), torch.float32)


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


class Opener(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, held):
        return self.layer(held.tensor)


class Hides(nn.Module):
    """It hands an object with a tensor in it from layer to layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Opener() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(Held(x))
        return x


class Whole(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 4), middle, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.middle(self.first(x)))


def test_what_cannot_be_looked_into_is_a_block_as_a_whole():
    model = Whole(Hides())
    assert [block.name for block in trace(model, (4,), torch.float32)] == ["first", "middle", "head"]
    assert_same_as_whole(model, quantities())


class Experts(nn.Module):
    """How many rows each gets depends on the data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x):
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (x.argmax(1) % 3 == number).nonzero()[:, 0]
            found = found.index_add(0, rows, expert(x[rows]))
        return found


def test_shapes_that_depend_on_the_data_are_refused_in_words():
    with pytest.raises(ModelError, match=r"middle.*: it makes a shape of the values in a tensor"):
        trace(Whole(Experts()), (4,), torch.float32)


class Doubled(torch.autograd.Function):
    """Its backward is its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class Counts(nn.Module):
    """Between its layers: a function with a backward of its own, a buffer that counts, narrow types for a while."""

    def __init__(self):
        super().__init__()
        self.layers, self.unused = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.unused(x)
        x = Doubled.apply(self.layers[0](x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x @ torch.ones(4, 4)
        rows = list(self.layers[1](x.float()))
        return self.layers[2](torch.stack(rows[::-1]) if len(rows) == 3 else torch.stack(rows))


def test_functions_between_layers_do_what_they_did(monkeypatch):
    model = Counts()
    with pytest.raises(ModelError, match="does other things with 6 rows than with 4"):
        trace(model, (4,), torch.float32)
    monkeypatch.setattr(Counts, "forward", lambda self, x: _without_rows(self, x))
    assert_same_as_whole(model, quantities())
    chain = trace(model, (4,), torch.float32)
    replayed(chain, quantities(), training=True)
    assert (float(model.calls), int(model.unused.num_batches_tracked)) == (1.0, 1)


def _without_rows(self, x):
    self.calls += 1
    self.unused(x)
    x = Doubled.apply(self.layers[0](x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = x @ torch.ones(4, 4)
    return self.layers[2](self.layers[1](x.float()))


def test_a_layer_says_what_it_is():
    chain = trace(Decoder(), (7,), torch.int64)
    assert [str(block) for block in chain if block.kind == Layer.__name__] == [f"block {n} (Layer)" for n in (2, 3, 4)]
