"""Tests of what runnerkit uses of torch's internals, to be run with each supported version."""

import ast
import inspect
import re
from functools import update_wrapper, wraps
from pathlib import Path
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from runnerkit.support import torch_internals as internals
from tests.layers import modules
from tests.tiny import sgd

ROOT = Path(__file__).parents[1]
MODULE = "runnerkit.support.torch_internals"


def private_names(tree: ast.AST) -> set[str]:
    """Return the private names of torch that a module imports or reads from ``torch``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")}
        elif isinstance(node, ast.Attribute) and re.match(r"(torch|nn)\b", ast.unparse(node)):
            found.add(node.attr)
    return {name for name in found if re.match(r"_[a-zA-Z]", name)}


def test_one_module_holds_all_internals_of_torch():
    """No other module imports a private name of torch or reads one of another object than ``self``."""
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules(ROOT)}
    used = set(re.findall(r"[.\"](_[a-z]\w+)", sources[MODULE])) - {"_metadata", "_reset", "_utils"}
    others = {name: source for name, source in sources.items() if name != MODULE}

    assert {name: found for name, source in others.items() if (found := private_names(ast.parse(source)))} == {}
    assert {"_orig_mod", "_fsdp_param_group", "_worker_info"} <= used
    code = {name: re.sub(r'"""(.|\n)*?"""', "", source) for name, source in others.items()}
    assert {
        name: found
        for name, source in code.items()
        if (found := used & set(re.findall(r"(?<!\bself)[.\"](_[a-z]\w+)", source)))
    } == {}


@pytest.mark.parametrize(
    "source", ["from torch._x import y", "from torch.x import _y", "import torch._x", "torch.x._y(1)", "nn.x._Y"]
)
def test_a_private_name_is_found(source):
    assert len(private_names(ast.parse(source))) == 1


def test_classes_of_normalization_are_base_classes_of_all():
    norms = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]

    assert all(isinstance(each, internals.BatchNorm | internals.BatchOrInstanceNorm) for each in norms)
    assert isinstance(nn.InstanceNorm2d(2), internals.BatchOrInstanceNorm)
    assert not isinstance(nn.LayerNorm(2), internals.BatchOrInstanceNorm)


def test_names_that_torch_gives_are_those_of_its_objects():
    """The attributes exist where torch is said to keep them."""
    compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    schedulers = [ConstantLR(optimizer), ConstantLR(optimizer)]

    assert getattr(compiled, internals.COMPILED) is not compiled
    assert list(compiled.state_dict()) == [f"{internals.COMPILED}.weight", f"{internals.COMPILED}.bias"]
    assert "" in getattr(model.state_dict(), internals.METADATA)
    assert getattr(torch.optim.AdamW(model.parameters(), fused=True), internals.SKIPS_ITSELF)
    for outer in (ChainedScheduler(schedulers), SequentialLR(optimizer, schedulers, milestones=[1])):
        assert internals.inner_schedulers(outer) == schedulers
        assert len(outer.state_dict()[internals.INNER_SCHEDULERS]) == 2
    assert internals.last_milestone(SequentialLR(optimizer, schedulers, milestones=[3])) == 3


def test_attributes_that_torch_sets_on_an_optimizer_are_known():
    """A stepped optimizer with a scheduler has the attributes of its class and those in the list."""
    optimizer = sgd(nn.Linear(1, 1))
    own = {"defaults", "state", "param_groups"}
    scheduler = ConstantLR(optimizer)
    optimizer.step()
    scheduler.step()

    others = {name for name in vars(optimizer) if not internals.is_set_by_torch(name)}
    assert own <= others
    assert others - own <= {"_warned_capturable_if_run_uncaptured", "_patch_step_function"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_on_many_tensors_are_those_on_each(dtype):
    def tensors():
        return [torch.full((2,), 3.0, dtype=dtype), torch.full((3, 1), 5.0, dtype=dtype)]

    def results(change):
        change(values := tensors())
        return values

    for change, expected in (
        (lambda each: internals.divide_each_(each, 4), [value / 4 for value in tensors()]),
        (lambda each: internals.multiply_each_(each, tensors()), [value * value for value in tensors()]),
        (lambda each: internals.interpolate_each_(each, [2 * v for v in tensors()], 0.5), [1.5 * v for v in tensors()]),
    ):
        torch.testing.assert_close(results(change), expected)
    torch.testing.assert_close(internals.norm_of_each(tensors()), [value.norm() for value in tensors()])


def test_hooks_are_found_and_cleared():
    """Hooks of a module's forward pass are removed; hooks of gradients are found."""
    model, calls = nn.Linear(1, 1), []
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    internals.clear_forward_hooks(model)
    model(torch.ones(1, 1))
    model.weight.register_hook(lambda gradient: gradient)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)

    assert calls == []
    assert internals.has_gradient_hooks(model.weight) and internals.has_gradient_hooks(model.bias)
    assert not internals.has_gradient_hooks(nn.Linear(1, 1).weight)
    assert not internals.has_no_buckets(nn.Linear(1, 1))
    assert "self._use_python_reducer" in inspect.getsource(DistributedDataParallel)


def test_a_child_with_two_names_has_both():
    model = nn.Sequential()
    model.a = model.b = nn.ReLU()

    assert [name for name, _ in internals.children(model)] == ["a", "b"]


class Hidden(IterableDataset):
    def __iter__(self):
        with internals.without_worker_info():
            is_hidden = get_worker_info() is None
        yield torch.tensor([is_hidden, get_worker_info().num_workers])


def test_a_worker_can_look_like_none():
    found = torch.cat(list(DataLoader(Hidden(), batch_size=None, num_workers=2)))

    assert found.tolist() == [1, 2] * 2


def test_the_awaited_worker_is_the_one_of_the_next_batch():
    iterator = iter(DataLoader(range(4), num_workers=2))
    first = internals.awaited_worker(iterator)
    next(iterator)
    second = internals.awaited_worker(iterator)

    assert (first[0], second[0]) == (0, 1) and first[1] != second[1]
    assert internals.awaited_worker(iter([1])) is None


def test_a_storage_gives_its_bytes_without_a_warning():
    with pytest.warns(UserWarning, match="TypedStorage is deprecated"):
        storage = torch.ones(3).storage()

    assert internals.untyped(storage).nbytes() == 12


def trained(take_step, prepare=lambda optimizer: None):
    """Return the weights after two steps, and what `prepare` returned."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = prepare(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        take_step(optimizer)
    return model.weight.detach().clone(), kept


def with_hooks(optimizer):
    calls = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(("before", *map(type, given))))
    optimizer.register_step_post_hook(lambda *given: calls.append(("after", *map(type, given))))
    return calls


def with_replaced_arguments(optimizer):
    """A closure in place of no arguments."""
    calls = []
    optimizer.register_step_pre_hook(lambda *_: ((optimizer,), {"closure": lambda: calls.append("closure")}))
    return calls


def with_a_step_of_its_own(optimizer):
    calls, step = [], optimizer.step
    optimizer.step = lambda: (calls.append("own"), step())
    return calls


def with_a_scheduler_over_its_own(optimizer):
    calls = []
    optimizer.step = MethodType(lambda self: (calls.append("own"), type(self).step(self)), optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return calls


def with_a_wrapper_that_looks_like_a_schedulers(optimizer):
    calls, step = [], optimizer.step
    optimizer.step = update_wrapper(lambda: (calls.append("own"), step()), type(optimizer).step)
    optimizer.step._wrapped_by_lr_sched = True  # as some do against torch's warning
    return calls


def with_a_scheduler(optimizer):
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return with_hooks(optimizer)


@pytest.mark.parametrize(
    "prepare",
    [
        with_hooks,
        with_replaced_arguments,
        with_a_step_of_its_own,
        with_a_wrapper_that_looks_like_a_schedulers,
        with_a_scheduler,
        with_a_scheduler_over_its_own,
    ],
)
def test_a_step_without_a_record_does_what_a_step_does(prepare):
    expected, calls = trained(lambda optimizer: optimizer.step(), prepare)

    weights, same_calls = trained(internals.step, prepare)

    assert torch.equal(weights, expected) and same_calls == calls and calls != []


def test_global_hooks_see_a_step_without_a_record():
    calls = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        trained(internals.step)
    finally:
        for each in hooks:
            each.remove()

    assert calls == ["before", "after"] * 2


@pytest.mark.filterwarnings("error")  # torch warns of a schedule that begins before the optimizer
def test_a_schedule_notices_a_step_without_a_record():
    def step_both(optimizer):
        internals.step(optimizer)
        schedules[0].step()

    schedules = []
    _, scheduler = trained(
        step_both, lambda optimizer: schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1)) or schedules[0]
    )

    assert scheduler.last_epoch == 2


class Own(torch.optim.SGD):
    """Steps twice."""

    def step(self, closure=None):
        super().step(closure)
        super().step(closure)


class Wrapped(torch.optim.SGD):
    """Steps twice, in a method that has torch's marks."""

    @wraps(torch.optim.SGD.step)
    def step(self, closure=None):
        super().step(closure)
        super().step(closure)


class NotTorchs:
    __slots__ = ("num_steps",)

    def __init__(self):
        self.num_steps = 0

    def step(self):
        self.num_steps += 1


class Delegate:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def test_optimizers_of_users_are_stepped():
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # torch marks a class when an object of it is made
    for make in (Own, Wrapped, lambda *given, **options: Delegate(Own(*given, **options))):
        results = []
        for take_step in (lambda optimizer: optimizer.step(), internals.step):
            weight, calls = nn.Parameter(torch.ones(1)), []
            weight.grad = torch.ones(1)
            optimizer = make([weight], lr=0.25)
            optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
            take_step(optimizer)
            results.append((weight.item(), len(calls)))
        assert results[0] == results[1] and results[0][0] == 0.5
    other = NotTorchs()
    internals.step(other)

    assert other.num_steps == 1


def test_a_class_that_is_patched_is_stepped(monkeypatch):
    calls, step = [], torch.optim.SGD.step

    @wraps(step)
    def timed(self, closure=None):
        calls.append("timed")
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", timed)

    trained(internals.step, with_hooks)

    assert calls == ["timed"] * 2


@pytest.mark.parametrize("wrong", [True, [(1,), {}], ((1,), {}, 2)])
def test_what_a_hook_may_not_return_is_told_as_by_torch(wrong):
    def prepare(optimizer):
        optimizer.register_step_pre_hook(lambda *_: wrong)

    for take_step in (lambda optimizer: optimizer.step(), internals.step):
        with pytest.raises(RuntimeError, match="must return None or a tuple of"):
            trained(take_step, prepare)


def test_batches_without_records_are_those_of_the_loader():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    for data, options in (
        (range(5), {"batch_size": 2}),
        (Stream(), {"batch_size": 2}),
        (Stream(), {"batch_size": None}),
    ):
        loader = DataLoader(data, **options)
        assert [*map(str, internals.without_records(iter(loader)))] == [*map(str, loader)]
    workers = iter(DataLoader(range(5), num_workers=1))
    assert internals.without_records(workers) is workers


def test_a_batch_that_fails_raises_its_error_without_records():
    def fail(samples):
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        next(internals.without_records(iter(DataLoader(range(2), collate_fn=fail))))


def test_a_loader_goes_on_after_an_error_without_records():
    """As torch's own iterator does, so that a wrapper may leave out what cannot be read."""

    class Broken(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 1:
                raise OSError("broken")
            return index

    batches, found = internals.without_records(iter(DataLoader(Broken(), batch_size=None))), []
    assert len(batches) == 4
    while True:
        try:
            found.append(next(batches))
        except OSError:
            continue
        except StopIteration:
            break

    assert found == [0, 2, 3]


def test_a_wrong_length_is_warned_of_without_records():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

        def __len__(self):
            return 3

    loader = DataLoader(Stream(), batch_size=None)
    assert len(loader) == 3

    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len(list(internals.without_records(iter(loader)))) == 5


@pytest.mark.parametrize("config", [None, _ExperimentalConfig(profile_all_threads=True)])
def test_a_profiler_gets_the_records(config):
    """The labels of torch are in a trace, as those of a hand-written loop are."""
    with torch.profiler.profile(experimental_config=config) as profiler:
        trained(internals.step)
        list(internals.without_records(iter(DataLoader(range(4)))))

    labels = {each.key for each in profiler.key_averages()}
    assert "Optimizer.step#SGD.step" in labels
    assert any(each.startswith("enumerate(DataLoader)") for each in labels)


def test_a_model_without_records_is_a_distributed_data_parallel_one(tmp_path):
    """The same outputs and gradients; a profiler gets the record of the forward pass."""
    group = dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        results = []
        for kind in (DistributedDataParallel, internals.UnrecordedDDP):
            torch.manual_seed(0)
            model = kind(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
            for scale in (1.0, 2.0):
                outputs = model(torch.arange(6.0).view(3, 2) * scale)
                outputs.pow(3).sum().backward()
            results.append([outputs, *(each.grad for each in model.parameters()), *model.buffers()])
            with torch.profiler.profile() as profiler:
                model(input=torch.ones(2, 2))
            assert "DistributedDataParallel.forward" in {each.key for each in profiler.key_averages()}
            model.eval()
            with torch.no_grad():
                assert model(torch.ones(1, 2)).shape == (1, 2)
    finally:
        dist.destroy_process_group(group)

    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
