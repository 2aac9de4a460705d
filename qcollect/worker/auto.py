"""Capture from a training script that does not know qcollect.

    qcollect run mxfp8 --set script=my_train.py            the launcher switches it on in every worker
    torchrun ... -m qcollect.worker.auto my_train.py ARGS  by hand, without the launcher
    QCOLLECT_AUTO=1 torchrun ... my_train.py ARGS          the same, with an installed wheel

The first module whose forward runs in training mode is the model; it is handed to ``collect``, which
takes its settings from the plan or the environment. An optimizer's ``step`` ends an iteration. A
script that calls ``collect`` itself is left alone.
"""

import atexit
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qcollect.errors import UsageError
from qcollect.worker import collect as collect_module
from qcollect.worker.collector import Collector
from qcollect.worker.script import finish, never_free, run_script
from qcollect.worker.sites import find_modules, unwrap

_original_call = nn.Module.__call__


class TargetReached(SystemExit):
    """Every rank has its share: the script ends here, as if it had come to its end."""

    def __init__(self) -> None:
        super().__init__(0)


class _Auto:
    """Waits for the model, then steps its collector with the first optimizer that steps."""

    def __init__(self, *, exit_at_target: bool) -> None:
        self.exit_at_target = exit_at_target
        self.collector: Collector | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_over = False

    def on_call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if collect_module.was_called:
            disable()
        elif is_model(module):
            disable()
            never_free(module)
            self.collector = collect_module.collect(module)
            refuse_metrics(self.collector)
            self.collector.__enter__()
            atexit.register(self.collector.__exit__, None, None, None)
        return _original_call(module, *args, **kwargs)

    def on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.collector is None or self._is_over:
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:  # a second optimizer of the same iteration
            return
        self._is_over = self.collector.step()
        if self._is_over and self.exit_at_target:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            raise TargetReached


def is_model(module: nn.Module) -> bool:
    """Whether a module that is called is the model in training: it has something to capture."""
    return module.training and torch.is_grad_enabled() and bool(find_modules(unwrap(module)))


def refuse_metrics(collector: Collector) -> None:
    """Nothing, if what is waited for can be seen without the script's help.

    Raises:
        UsageError: it is in metrics that nobody gives.
    """
    if collector.start.needs_metrics:
        raise UsageError(
            "capture.trigger.on waits for what only the script can tell, and the script does not call "
            "qcollect.collect; let it, and its run.step(loss=..., grad_norm=...), or wait for signal alone"
        )


def enable(*, exit_at_target: bool = False) -> None:
    """Watch for the model from now on.

    Args:
        exit_at_target: end the process with 0 once every rank has its share (the launcher's way);
            otherwise training goes on.
    """
    auto = _Auto(exit_at_target=exit_at_target)
    nn.Module.__call__ = lambda self, *args, **kwargs: auto.on_call(self, *args, **kwargs)  # type: ignore[method-assign]
    register_optimizer_step_post_hook(auto.on_step)


def disable() -> None:
    """Stop watching; what is being captured goes on."""
    nn.Module.__call__ = _original_call  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a script with capture on; ``arguments`` are the script and its own."""
    if not arguments:
        sys.exit("usage: torchrun ... -m qcollect.worker.auto SCRIPT [ARGS]")
    script = Path(arguments[0]).absolute()
    if not script.exists():
        sys.exit(f"error: there is no training script {script}")
    enable()
    run_script(str(script), arguments[1:])
    finish()


if __name__ == "__main__":
    # the module under its real name: ``-m`` would make a second copy of its state
    from qcollect.worker.auto import main as run_main

    run_main(sys.argv[1:])
