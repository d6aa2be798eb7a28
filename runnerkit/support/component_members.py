"""Members of optimizers, schedulers and modules that some classes lack, the user's included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from runnerkit.support.members import Member, Members


class OptimizerMembers(Members):
    """Members of optimizers; ``groups_of`` in types.py returns its groups.

    Attributes:
        defaults: the options that it was made with.
        train, eval: exchange the weights with those for evaluation, in schedule-free optimizers.
        optimizer: the one inside a wrapper.
        counters: what a wrapper keeps in the groups beside options.
    """

    defaults = Member[Mapping[str, Any]]({})
    optimizer = Member[Any](None)
    counters = Member[Iterable[str]](())
    train = Member[Callable[[], Any] | None](None)
    eval = Member[Callable[[], Any] | None](None)


class StateMembers(Members):
    """Methods of components whose state a checkpoint holds."""

    state_dict = Member[Callable[[], dict[str, Any]] | None](None)
    load_state_dict = Member[Callable[[dict[str, Any]], Any] | None](None)


class SchedulerMembers(StateMembers):
    """Members of learning-rate schedulers; ``inner_schedulers`` in torch_internals.py returns those inside it.

    Attributes:
        optimizer: the one that it schedules.
        last_epoch: its number of steps, in schedulers of torch.
        lr_lambdas: the functions of a LambdaLR.
        step_update, t_in_epochs: the step after each batch, and whether the schedule counts epochs, in timm.
        lr_scheduler: the ReduceLROnPlateau inside timm's PlateauLRScheduler.
    """

    optimizer = Member[Any](None)
    last_epoch = Member[int | None](None)
    lr_lambdas = Member[Iterable[Any]](())
    step_update = Member[Callable[..., Any] | None](None)
    t_in_epochs = Member[Any](True)
    lr_scheduler = Member[Any](None)


class ModuleMembers(Members):
    """Members of modules.

    Attributes:
        reduction: how a criterion reduces the losses of a batch.
        reset_parameters, own_reset: fill the parameters of a layer of torch.
        init_weights: fills the parameters of a module inside a model of Hugging Face.
        config, generation_config: settings of a model of Hugging Face.
        adapter_layer_names, reset_lora_parameters: of a layer with adapters of peft, and of one with those of LoRA.
        peft_config: the settings of the adapters in a model, by their names.
    """

    reduction = Member[Any](None)
    reset_parameters = Member[Callable[[], Any] | None](None)
    own_reset = Member[Callable[[], Any] | None](None, name="_reset_parameters")
    init_weights = Member[Callable[[Any], Any] | None](None, name="_init_weights")
    config = Member[Any](None)
    generation_config = Member[Any](None)
    adapter_layer_names = Member[Iterable[str]](())
    reset_lora_parameters = Member[Callable[[str, Any], Any] | None](None)
    peft_config = Member[Mapping[str, Any]]({})
