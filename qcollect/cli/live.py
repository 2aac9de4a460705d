"""A run's progress while it runs, in the terminal that started it."""

from qcollect.cli.progress import Display
from qcollect.monitor.render import plain_line, render_run
from qcollect.monitor.snapshot import RunSnapshot


class RunDisplay(Display):
    """The dashboard of the run that is executed, or one plain line when something changed."""

    def on_tick(self, snapshot: RunSnapshot) -> None:
        self.show(plain_line(snapshot), render_run(snapshot))
