"""A run's progress while it runs, in the terminal that started it."""

from rich.console import Group
from rich.text import Text

from qcollect.cli.progress import Display
from qcollect.monitor.render import plain_line, printable, render_run
from qcollect.monitor.run_record import RunState
from qcollect.monitor.snapshot import RunSnapshot

FORCE_HINT = "press Ctrl-C again to force"


class RunDisplay(Display):
    """The dashboard of the run that is executed, or one plain line when something changed; its outcome is not ours."""

    def on_tick(self, snapshot: RunSnapshot) -> None:
        if not snapshot.state.is_active:
            return
        key = (snapshot.run_dir, snapshot.state, snapshot.phase, snapshot.captured)
        if snapshot.state == RunState.STOPPING:
            self.show(f"{plain_line(snapshot)}; {FORCE_HINT}", Group(render_run(snapshot), Text(FORCE_HINT)), key=key)
        else:
            self.show(plain_line(snapshot), render_run(snapshot), key=key)

    def on_line(self, rank: int, line: str) -> None:
        """A line of a rank's log, whole and by itself."""
        self.print_line(f"[rank {rank}] {printable(line)}")
