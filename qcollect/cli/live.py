"""A run's progress while it runs, in the terminal that started it."""

from qcollect.cli.progress import Display
from qcollect.monitor.render import plain_line, render_run
from qcollect.monitor.snapshot import RunSnapshot


class RunDisplay(Display):
    """The dashboard of the run that is executed, or one plain line when something changed; its outcome is not ours."""

    def on_tick(self, snapshot: RunSnapshot) -> None:
        if not snapshot.state.is_active:
            return
        key = (snapshot.run_dir, snapshot.state, snapshot.phase, snapshot.captured)
        self.show(plain_line(snapshot), render_run(snapshot), key=key)
