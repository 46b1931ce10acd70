"""What every lab shares: flags from a dataclass, the learner's functions by --impl, ranks, traces, a table of results.

A lab is a plain script for torchrun. It declares its settings and says what to do on every rank:

    @dataclass(frozen=True)
    class Settings(CommonSettings):  # or GPTSettings; its docstring's Attributes are the help of the flags
        repeats: int = flag(20, least=1)

    def run(lab: Lab[Settings]) -> None:
        lab.report.fact("ranks", dist.get_world_size(), lab.member.world_size)

    if __name__ == "__main__":
        main("01", Settings, run)

`distlab lab 01` starts it on ranks of this machine, `torchrun --nproc-per-node 4 .../lab.py` on any.
"""

from distlab.course.lab.member import Lab as Lab, main as main
from distlab.course.lab.report import LabReport as LabReport, ReportRow as ReportRow
from distlab.course.lab.settings import CommonSettings as CommonSettings, GPTSettings as GPTSettings, flag as flag
