"""What a program of the user's does to the model in a callback, or between the steps of a session, is the same in every method:
who learns is obeyed, and weights, which may be anywhere, are refused where they are touched.

`full` clamped a weight and `streamed` did not, freezing worked in one of them and unfreezing in none, all without a word.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from seqpart import Interrupted, Trainer
from seqpart.errors import DataError, ModelError, OptionError
from tests.choice import in_pairs, in_turn
from tests.command import SMALL, call
from tests.resuming import Killed, Stopping, kill

ROWS = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3
BATCHES = [(ROWS[0][at : at + 8], ROWS[1][at : at + 8]) for at in (0, 8, 16, 24)] * 2
WAYS = ["callback", "session"]
METHODS = ["full", "streamed", "auto"]
EACH_IN_TURN = pytest.mark.parametrize(("method", "way"), in_turn(METHODS, WAYS))


class Net(nn.Module):
    """The scale lies in one block with the last layer."""

    def __init__(self, bounded=False):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.scale, self.bounded = nn.Parameter(torch.tensor(2.0)), bounded

    def forward(self, x):
        scale = self.scale.clamp(0, 1) if self.bounded else self.scale
        return self.c(self.b(self.a(x).relu()).relu()) * scale


def net(frozen=(), **options):
    torch.manual_seed(0)
    model = Net(**options)
    for name in frozen:
        part = getattr(model, name)
        part.requires_grad_(False)
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


def plainly(model, touch, clip=None):
    optimizer = adamw(model.parameters())
    for update, (x, y) in enumerate(BATCHES, 1):
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        touch(model, update)
    return model


class Touching:
    def __init__(self, model, touch):
        self.model, self.touch = model, touch

    def on_step(self, event):
        self.touch(self.model, event.update)


def trainer(model, method, optimizer=adamw, **options):
    cut = {"partitions": (0, 1, 2)} if method == "streamed" else {}
    return Trainer(
        model, None, optimizer, mem_limit="2GB", method=method, batch_size=8, micro_batch_size=8, quiet=True, **cut, **options
    )


def trained(model, method, way, touch, place, **options):
    if way == "session":
        with trainer(model, method, **options).session(BATCHES[0]) as session:
            for update, batch in enumerate(BATCHES, 1):
                session.step(batch)
                touch(model, update)
    else:
        made = trainer(model, method, epochs=2, shuffle=False, output_dir=place / "run", **options)
        made.fit(ROWS, callbacks=[Touching(model, touch)])
    return model


def assert_same(model, plain):
    found, expected = model.state_dict(), plain.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]


def at(updates):
    """{update: (name, learns)} as a touch."""

    def touch(model, update):
        if update in updates:
            name, learns = updates[update]
            getattr(model, name).requires_grad_(learns)

    return touch


CHANGES = {
    "freeze": ((), {3: ("a", False)}),
    "freeze the last": ((), {3: ("c", False)}),
    "freeze and let learn again": ((), {2: ("b", False), 5: ("b", True)}),
    "one of two in a block": ((), {3: ("scale", False), 6: ("scale", True)}),
}
LATER = {
    "unfreeze": (("a",), {3: ("a", True)}),
    "unfreeze the base step by step": (("a", "b"), {2: ("b", True), 5: ("a", True)}),
    "unfreeze one of two in a block": (("scale",), {3: ("scale", True)}),
    "freeze, unfreeze another": (("a",), {2: ("c", False), 4: ("a", True), 6: ("c", True)}),
}


@pytest.mark.parametrize(("way", "method", "name", "clip"), in_pairs(WAYS, METHODS[:2], [*CHANGES], [None, 0.3]))
@pytest.mark.few(2)
def test_what_is_frozen_stays_from_the_next_update_on(way, method, name, clip, tmp_path):
    options, (frozen, updates) = {"clip_grad_norm": clip} if clip else {}, CHANGES[name]
    assert_same(
        trained(net(frozen), method, way, at(updates), tmp_path, **options), plainly(net(frozen), at(updates), clip)
    )  # fmt: skip


@pytest.mark.parametrize(("method", "name"), [("auto", "unfreeze"), *in_pairs(["full", "streamed"], [*LATER])])
@pytest.mark.few(1)
def test_what_is_to_learn_later_has_a_plan_made_anew(method, name, tmp_path):
    """The state of what was trained stays, also of what was frozen since."""
    frozen, updates = LATER[name]
    assert_same(trained(net(frozen), method, "callback", at(updates), tmp_path), plainly(net(frozen), at(updates)))


@pytest.mark.parametrize(
    ("stop", "name", "save"), in_pairs([3, 5, 7], ["one of two in a block", "freeze, unfreeze another"], ["never", "2"])
)
@pytest.mark.few(1)
def test_a_run_that_is_stopped_and_goes_on_knows_who_learns(stop, name, save, tmp_path):
    """The program that goes on builds the model as it was at first."""
    frozen, updates = {**CHANGES, **LATER}[name]
    touch = at(updates)

    def stopping(model, update):
        touch(model, update)
        if update == stop:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(net(frozen), "streamed", "callback", stopping, tmp_path, save_every=2)
    model = net(frozen)
    made = trainer(model, "streamed", epochs=2, shuffle=False, save_every=save)
    made.fit(ROWS, resume=tmp_path / "run", callbacks=[Touching(model, touch)])
    assert_same(model, plainly(net(frozen), touch))


def test_a_signal_and_a_new_plan_do_not_mind_each_other(tmp_path):
    import signal

    def touch(model, update):
        if update == 3:
            model.a.requires_grad_(True)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        trained(net(["a"]), "streamed", "callback", touch, tmp_path)
    model = net(["a"])
    trainer(model, "streamed", epochs=2, shuffle=False).fit(ROWS, resume=tmp_path / "run")
    assert_same(model, plainly(net(["a"]), at({3: ("a", True)})))


def test_a_session_has_no_room_for_what_did_not_learn_and_its_cure_works():
    model = net(["a"])
    with trainer(model, "streamed").session(BATCHES[0]) as session:
        session.step(BATCHES[0])
        model.a.requires_grad_(True)
        with pytest.raises(ModelError, match=r"a\.weight, a\.bias did not learn when the run was planned"):
            session.step(BATCHES[1])
        session.step(BATCHES[1])  # it goes on as it was
    model = net()
    with trainer(model, "streamed").session(BATCHES[0]) as session:
        model.a.requires_grad_(False)
        for update, batch in enumerate(BATCHES, 1):
            session.step(batch)
            if update == 3:
                model.a.requires_grad_(True)
    assert_same(model, plainly(net(["a"]), at({3: ("a", True)})))


class Begins(Touching):
    def on_begin(self, event):
        assert 0 < event.memory <= event.limit
        self.model.a.requires_grad_(False)


def test_in_on_begin_a_part_is_frozen_before_the_first_update(tmp_path):
    model = net()
    made = trainer(model, "streamed", epochs=2, shuffle=False, output_dir=tmp_path / "run")
    made.fit(ROWS, callbacks=[Begins(model, at({3: ("a", True)}))])
    assert_same(model, plainly(net(["a"]), at({3: ("a", True)})))


class FrozenFromTheStart:
    def __init__(self, model):
        self.model = model

    def on_begin(self, event):
        self.model.b.requires_grad_(False)

    def on_step(self, event):
        if event.update == 3:
            raise ZeroDivisionError


@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.few(1)
def test_what_never_learned_has_no_state_that_a_checkpoint_would_need(method, tmp_path):
    """A layer was frozen before its first update, and the checkpoint was refused: the state of its optimizer was missing."""
    model, again = net(), net()
    with pytest.raises(ZeroDivisionError):
        made = trainer(model, method, epochs=2, shuffle=False, save_every=2, output_dir=tmp_path / "run")
        made.fit(ROWS, callbacks=[FrozenFromTheStart(model)])
    trainer(again, method, epochs=2, shuffle=False).fit(ROWS, resume=tmp_path / "run")
    plain = plainly(net(["b"]), lambda *_: None)
    found = again.state_dict()
    assert [name for name, tensor in plain.state_dict().items() if not torch.equal(found[name], tensor)] == []


def test_where_everything_is_frozen_the_run_ends_in_words(tmp_path):
    with pytest.raises(ModelError, match="nothing learns any more"):
        trained(net(), "streamed", "callback", lambda model, _: model.requires_grad_(False), tmp_path)


@pytest.mark.parametrize("method", ["sil", "ist"])
def test_the_approximate_methods_obey_it_or_refuse_it(method, tmp_path):
    """ist trains copies of the layers."""
    torch.manual_seed(0)
    norm = nn.LayerNorm
    model = nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Linear(16, 16), norm(16), nn.ReLU(), nn.Linear(16, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class Freezing:
        def on_step(self, event):
            model[0].requires_grad_(False)

    options = {"partitions": 2} if method == "sil" else {"subnets": 2}
    made = Trainer(
        model, mem_limit="2GB", method=method, batch_size=8, micro_batch_size=8, epochs=2, lr=0.1, quiet=True,
        output_dir=tmp_path / "run", **options,
    )  # fmt: skip
    if method == "ist":
        with pytest.raises(ModelError, match="trains copies of parts of the model"):
            made.fit(ROWS, callbacks=[Freezing()])
        return
    made.fit(ROWS, callbacks=[Freezing()])
    moved = (model.state_dict()["0.weight"] - before["0.weight"]).abs().max()
    assert 0 < moved < 0.11, "one update of Adam moves a number by no more than the rate"


# --- by name and time ------------------------------------------------------------------------------------------------

STAGES = {"a.*": "epoch 1", "b.*": "update 2", "sc?le": "update 6"}


def plainly_in_stages(model, clip=None):
    for part in (model.a, model.b, model.scale, model.c.bias):
        part.requires_grad_(False)
    return plainly(model, at({2: ("b", True), 4: ("a", True), 6: ("scale", True)}), clip)


@pytest.mark.parametrize(("way", "method", "clip"), in_pairs(WAYS, ["full", "streamed", "checkpointed"], [None, 0.3]))
@pytest.mark.few(1)
def test_parameters_learn_by_name_and_time_as_in_a_plain_loop(way, method, clip, tmp_path):
    """Also one that the user had frozen. Afterwards requires_grad is the user's again."""
    options = {"clip_grad_norm": clip} if clip else {}
    stages, model = {**STAGES, "a.*": "update 4"} if way == "session" else STAGES, net(["scale"])
    trained(model, method, way, lambda *_: None, tmp_path, freeze="c.bias", unfreeze=stages, **options)
    found, expected = model.state_dict(), plainly_in_stages(net(), clip).state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["scale"]


def factory(rows, columns):
    """Makes a layer with the same weights each time."""

    def make():
        layer = nn.Sequential(nn.Linear(columns, rows), nn.Tanh())
        with torch.no_grad():
            layer[0].weight.copy_(torch.linspace(-0.3, 0.3, rows * columns).sin().view(rows, columns))
            layer[0].bias.zero_()
        return layer

    return make


@pytest.mark.parametrize("steps", [47, 20, 75])
@pytest.mark.few(1)
def test_a_run_that_is_killed_goes_on_with_what_learned_then(steps, tmp_path):
    """Blocks from factories. A checkpoint of update 2 has no state yet of what begins to learn there."""
    blocks = [factory(16, 8), factory(16, 16), factory(16, 16), factory(3, 16)]
    options = {"epochs": 2, "shuffle": False, "save_every": 2, "freeze": ["3.0.bias"]}
    options |= {"unfreeze": {"0.*": "update 2", "[12].0.weight": "epoch 1"}}
    with pytest.raises(Killed):
        trainer(blocks, "streamed", output_dir=tmp_path / "run", **options).fit(ROWS, reporter=Stopping(steps, kill))
    result = trainer(blocks, "streamed", **options).fit(ROWS, resume=tmp_path / "run")
    plain = nn.Sequential(*[make() for make in blocks])
    late = {"0.0.weight": 2, "0.0.bias": 2, "1.0.weight": 4, "2.0.weight": 4, "3.0.bias": 99}

    def touch(model, update):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(late.get(name, 0) <= update)

    touch(plain, 0)
    expected, found = plainly(plain, touch).state_dict(), load_file(result.weights)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_the_plan_shows_every_stage(capsys):
    asked = "--freeze", "0.*", "--unfreeze", "1.*=epoch 1,2.*=update 3"
    ran = call(capsys, *SMALL, "--method", "streamed", "--dry-run", *asked)
    block, head, every = 64 * 64 + 3 * 64, 64 * 10 + 10 + 2 * 64, 13_642
    learn = {"1": head, "4": head + block, "24": head + 2 * block}
    lines = [f"from update {update} on {count:,} of {every:,} weights learn" for update, count in learn.items()]
    assert [line.partition(" (")[0] for line in ran.out.splitlines() if "weights learn" in line] == lines
    assert "plan for 9,354 parameters that learn, and 4,288 that are frozen" in ran.out


class Counting(torch.optim.SGD):
    """Counts its updates in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


REFUSED = {
    "no such parameter": ({"freeze": "d.*,b.*"}, r"freeze: .*found d\.\*\. Did you mean"),
    "a module's name": ({"unfreeze": {"b": "epoch 1"}}, r"unfreeze: .*found b\. Did you mean b\.\*\?"),
    "misspelled": ({"unfreeze": {"b.*": "epcoh 1"}}, "such as .*epoch 1.*1 or more; found .*epcoh 1"),
    "negative": ({"unfreeze": {"b.*": "update -1"}}, "1 or more; found .*update -1"),
    "at the end": ({"unfreeze": {"b.*": "epoch 2"}}, "before the end of the run, which has 8 updates .4 in an epoch"),
    "all later": ({"unfreeze": {"*": "epoch 1"}}, "expected something that learns from the first update on"),
    "nothing ever": ({"freeze": "*"}, "nothing learns: .* or in freeze"),
    "approximate": ({"unfreeze": {"b.*": "epoch 1"}, "method": "sil"}, "unfreeze goes with method.*; found method=.sil"),
    "an average": ({"unfreeze": {"b.*": "epoch 1"}, "ema": 0.9}, "unfreeze does not go with ema"),
    "counted": ({"unfreeze": {"b.*": "epoch 1"}, "optimizer": Counting}, "unfreeze: optimizer Counting counts updates"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_frozen_or_unfrozen_is_refused_before_the_run(name):
    options, said = REFUSED[name]
    model = net()
    with pytest.raises((OptionError, ModelError), match=said):
        trainer(model, **{"method": "streamed", "epochs": 2, **options}).plan(ROWS)
    assert all(parameter.requires_grad for parameter in model.parameters())


def clamp(model, _):
    with torch.no_grad():
        model.scale.clamp_(0, 1)


TOUCHES = {
    "a clamp": clamp,
    "values": lambda model, _: model.scale.item(),
    "a norm": lambda model, _: torch.linalg.vector_norm(model.scale),
    "data": lambda model, _: model.scale.data.mul_(2),
    "other data": lambda model, _: setattr(model.scale, "data", torch.zeros(())),
    "all of them": lambda model, _: model.state_dict(),
    "in a list": lambda model, _: torch._foreach_norm([*model.parameters()]),
    "a forward pass": lambda model, _: model(ROWS[0][:4]),
}


@pytest.mark.parametrize(("name", "method", "way"), in_turn([*TOUCHES], METHODS, WAYS))
@pytest.mark.few(2)
def test_a_weight_that_is_touched_is_refused_where_that_is_done(name, method, way, tmp_path):
    model = net()
    with pytest.raises(ModelError, match=r"is not in the model while a run has it.*state_dict.*forward") as error:
        trained(model, method, way, TOUCHES[name], tmp_path)
    assert any(frame.name in ("clamp", "<lambda>") for frame in error.traceback)
    assert type(model.scale) is nn.Parameter and (model.scale.item() == 2.0) == (way == "callback")  # a session trained it


@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.few(1)
def test_the_cure_of_a_clamp_in_the_forward_pass_works(method, tmp_path):
    def nothing(*_):
        pass

    assert_same(trained(net(bounded=True), method, "callback", nothing, tmp_path), plainly(net(bounded=True), nothing))


@EACH_IN_TURN
@pytest.mark.few(1)
def test_shapes_and_what_they_say_may_be_looked_at(way, method, tmp_path):
    seen = []

    def look(model, _):
        numbers = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)
        weight = model.b.weight
        seen.append((numbers, weight.shape, weight.size(0), len(weight), weight.ndim, weight.dtype, weight.device.type))
        assert weight.grad is None and weight.is_leaf and "b.weight" in repr(weight)

    trained(net(["a"]), method, way, look, tmp_path)
    whole = sum(p.numel() for p in net().parameters())
    numbers = whole, whole - 8 * 16 - 16
    assert set(seen) == {(numbers, torch.Size([16, 16]), 16, 16, 2, torch.float32, "cpu")}


@EACH_IN_TURN
@pytest.mark.few(1)
def test_options_of_an_optimizer_that_are_changed_are_refused(way, method, tmp_path):
    held = []

    def build(parameters):
        held.append(adamw(parameters))
        return held[-1]

    def touch(_, update):
        if update == 2:
            held[-1].param_groups[0]["weight_decay"] = 0.0

    with pytest.raises(OptionError, match=r"param_groups.* were changed during a run.*lr_schedule"):
        trained(net(), method, way, touch, tmp_path, optimizer=build)


@pytest.mark.parametrize(
    ("method", "place"), in_turn(["full", "streamed"], ["all tensors", "a tensor", "a module", "a module of the model itself"])
)
def test_a_tensor_or_a_module_that_is_put_in_the_place_of_another_is_refused(method, place):
    """`full` trained a new tensor, `streamed` neither it nor the other; a new module was left out of the run."""
    model = net()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with trainer(model, method).session(BATCHES[0]) as session:
        session.step(BATCHES[0])
        if place == "all tensors":
            model.load_state_dict(values, assign=True)
        elif place == "a tensor":
            model.b.bias = nn.Parameter(torch.ones(16))
        elif place == "a module":
            model.b.extra = nn.Identity()
            session.step(BATCHES[0])  # the run knows nothing of it, and needs nothing of it
            model.b.extra = nn.Tanh()
        else:
            model.b = nn.Linear(16, 16)
        with pytest.raises(ModelError, match=r"another (tensor|module) was put in the place of '\w+' during a run"):
            session.step(BATCHES[1])


def test_a_layer_that_is_added_between_two_steps_is_refused():
    """It was left out of the training, and was in the model afterwards."""
    model = nn.Sequential(net(), nn.Tanh())
    with trainer(model, "full").session(BATCHES[0]) as session:
        session.step(BATCHES[0])
        model.append(nn.Tanh())
        with pytest.raises(ModelError, match="another module was put in the place of '2' during a run, or added"):
            session.step(BATCHES[1])


class Annealed(nn.Module):
    """Reads attributes between its layers, in them, and in a loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), Scaled(), nn.Linear(16, 3)
        self.tau, self.beta, self.note, self.order, self.options = 1.0, 1.0, 0, [1, 2], {"skip": False}
        self.mask, self.gain = torch.ones(16), torch.tensor(1.0)
        self.act = torch.relu

    def forward(self, x, labels=None):
        h = self.act(self.a(x) / self.tau) * self.mask * self.gain
        for power in self.order:
            h = h + self.b(h) ** power / self.b.width
        out = self.c(h if self.options["skip"] else h + self.b(h))
        return out if labels is None else {"loss": F.cross_entropy(out, labels) * self.tau, "logits": out}

    def loss(self, out, labels):
        return F.cross_entropy(out, labels) * self.beta


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.scale, self.width = 1.0, 0.5

    def forward(self, x):
        self.width = float(x.shape[1])  # which is no change of the user's
        return super().forward(x) * self.scale


ATTRIBUTES = {
    "tau of Annealed": lambda model, update: setattr(model, "tau", 0.5**update),
    "mask of Annealed": lambda model, update: setattr(model, "mask", model.mask.clone()),
    "order of Annealed": lambda model, update: model.order.append(1),
    "options of Annealed": lambda model, update: model.options.update(skip=True),
    "act of Annealed": lambda model, update: setattr(model, "act", torch.tanh),
    "width of Scaled": lambda model, update: setattr(model.b, "width", 2.0),
}


@pytest.mark.parametrize(("name", "method", "way"), in_turn([*ATTRIBUTES], METHODS[:2], WAYS))
@pytest.mark.few(2)
def test_an_attribute_that_code_between_layers_reads_is_refused_where_it_is_changed(name, method, way, tmp_path):
    """A weight of a loss, a temperature or a flag kept what it was when the model was recorded, in silence."""
    with pytest.raises(ModelError, match=rf"{name} was changed during a run\. Code between layers reads it"):
        trained(Annealed(), method, way, ATTRIBUTES[name], tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("register", [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook])
def test_a_hook_on_a_module_that_was_taken_apart_is_refused_during_a_run(register, way, tmp_path):
    """It was never called. On a layer it is, from the next update on."""
    with pytest.raises(ModelError, match="a hook of Annealed was added or removed during a run"):
        trained(Annealed(), "full", way, lambda model, update: register(model, lambda *given: None), tmp_path / "whole")
    called = list[int]()

    def touch(model, update):
        handle = register(model.a, lambda *given: called.append(update))
        model.note = handle

    trained(Annealed(), "full", way, touch, tmp_path / "layer")
    assert called


def test_it_may_be_put_back_and_is_refused_before_an_evaluation_and_in_a_loss_of_the_model_too():
    model = Annealed()
    made = Trainer(model, "model", mem_limit="2GB", method="full", batch_size=8, quiet=True)
    batch = {"x": ROWS[0][:8], "labels": ROWS[1][:8]}
    with made.session(batch) as session:
        model.tau = 0.5
        for use in (session.step, session.step, session.evaluate):
            with pytest.raises(ModelError, match="tau of Annealed"):
                use(batch)
        model.tau = 1.0
        session.step(batch)
        model.tau = 0.5  # of no matter any more


@pytest.mark.parametrize(("method", "way"), in_turn(METHODS[:2], WAYS))
def test_attributes_that_nothing_between_layers_reads_are_obeyed(method, way, tmp_path):
    """In layers, in a loss, and tensors that are changed in place: the cures that the refusal names."""

    def touch(model, update):
        model.note, model.beta, model.b.scale = update, 1 / update, 1 + update / 10
        model.mask[update] = 0.0
        model.gain.fill_(0.9**update)

    def plain(model):
        optimizer = adamw(model.parameters())
        for update, (x, y) in enumerate(BATCHES, 1):
            optimizer.zero_grad()
            model.loss(model(x), y).backward()
            optimizer.step()
            touch(model, update)
        return model

    torch.manual_seed(0)
    model = Annealed()
    other = copy.deepcopy(model)
    made = Trainer(
        model, model.loss, adamw, mem_limit="2GB", method=method, batch_size=8, micro_batch_size=8, quiet=True,
        **({} if way == "session" else {"epochs": 2, "shuffle": False, "output_dir": tmp_path / "run"}),
    )  # fmt: skip
    if way == "session":
        with made.session(BATCHES[0]) as session:
            for update, batch in enumerate(BATCHES, 1):
                session.step(batch)
                touch(model, update)
    else:
        made.fit(ROWS, callbacks=[Touching(model, touch)])
    assert_same(model, plain(other))


class Weighted:
    """A loss with attributes of its own, in a module that it holds too."""

    def __init__(self):
        self.inner, self.power = nn.CrossEntropyLoss(), 1

    def __call__(self, out, labels):
        return self.inner(out, labels) ** self.power * self.inner.factor


@pytest.mark.parametrize(("way", "method"), in_turn(WAYS, METHODS[:2]))
def test_attributes_that_were_changed_are_in_the_checkpoint_of_a_run_that_goes_on(way, method, tmp_path, caplog):
    """The next update had those of __init__, without a word."""

    def touched(model, loss, update):
        model.b.scale, loss.power, loss.inner.factor = 1 + update / 10, 1 + update % 2, np.float64(1 / update)
        model.mask[update] = 0.0
        model.gain.fill_(0.9**update)
        model.note = [update, {"inf"}] if update == 5 else [update, float("inf")]

    def run(model, place, resume=None, stop=0, method=method):
        loss = Weighted()
        loss.inner.factor = 1.0
        options = {} if way == "session" else {"epochs": 2, "shuffle": False, "save_every": 1}
        made = Trainer(
            model, loss, adamw, mem_limit="2GB", method=method, batch_size=8, micro_batch_size=8, output_dir=place, **options
        )  # fmt: skip

        def touch(model, update):
            touched(model, loss, update)
            if update == stop:
                raise ZeroDivisionError

        if way == "callback":
            made.fit(ROWS, callbacks=[Touching(model, touch)], resume=resume)
            return model
        with made.session(BATCHES[0], resume=resume) as session:
            for update, batch in enumerate(BATCHES[session.updates :], session.updates + 1):
                session.step(batch)
                touched(model, loss, update)
                if update == stop:
                    session.save()
                    raise ZeroDivisionError
        return model

    torch.manual_seed(0)
    models = [Annealed() for _ in range(2)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    whole = run(copy.deepcopy(models[0]), tmp_path / "whole")
    for stop in (3, 5):
        with pytest.raises(ZeroDivisionError):
            run(copy.deepcopy(models[0]), tmp_path / f"{stop}", stop=stop)
        found = run(copy.deepcopy(models[0]), tmp_path / f"{stop}", resume=tmp_path / f"{stop}")
        assert_same(found, whole)
        assert found.note == whole.note
        assert ("had set model.note to" in caplog.text) == (stop == 5)


@pytest.mark.parametrize("given", ["a pair", "a data set", "its tensors", "a loader", "a part"])
def test_rows_that_are_kept_are_refused_where_they_are_changed(given, tmp_path):
    """Pseudo labels that a callback wrote between epochs were ignored, unless a loader had them."""
    y = ROWS[1].clone()
    items = TensorDataset(ROWS[0], y)
    data = {"a pair": (ROWS[0], y), "a loader": DataLoader(items, batch_size=8), "a part": Subset(items, range(32))}.get(
        given, items
    )

    class Relabel:
        def on_epoch(self, event):
            if given == "its tensors":
                items.tensors = ROWS[0], y + 0
            else:
                y.fill_(0)

    options = {} if given == "a loader" else {"batch_size": 8, "shuffle": False}
    made = Trainer(
        net(), None, adamw, mem_limit="2GB", method="full", epochs=2, quiet=True, output_dir=tmp_path / "run", **options
    )
    if given == "a loader":
        made.fit(data, callbacks=[Relabel()])
        return
    with pytest.raises(DataError, match="a tensor of the data was changed during a run"):
        made.fit(data, callbacks=[Relabel()])


def test_a_data_set_of_one_s_own_may_hold_tensors_that_are_no_rows(tmp_path):
    """Its predictions, one for each row, were taken for labels that a callback changed."""

    class Predicted(Dataset):
        def __init__(self):
            self.predictions = torch.zeros(len(ROWS[0]))

        def __len__(self):
            return len(ROWS[0])

        def __getitem__(self, number):
            return ROWS[0][number], ROWS[1][number]

    rows = Predicted()

    class Predicts:
        def on_epoch(self, event):
            rows.predictions += 1

    Trainer(net(), None, adamw, mem_limit="2GB", method="full", epochs=2, batch_size=8, quiet=True, output_dir=tmp_path).fit(
        rows, callbacks=[Predicts()]
    )
    assert rows.predictions.eq(2).all()
