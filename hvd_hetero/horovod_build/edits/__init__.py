"""What the build changes in Horovod's sources, and why.

`SOURCE_EDITS` are made before the compiler runs. `PACKAGE_EDITS`, of Python files alone, are made in the wheel that the
compiler left: a change in them compiles nothing again.
"""

from hvd_hetero.horovod_build.edits.authentication import AUTHENTICATION_EDITS, TOKEN_EDITS
from hvd_hetero.horovod_build.edits.compilers import COMPILER_EDITS
from hvd_hetero.horovod_build.edits.connections import CONNECTION_EDITS
from hvd_hetero.horovod_build.edits.cuda import CUDA_EDITS
from hvd_hetero.horovod_build.edits.discovery import DISCOVERY_EDITS
from hvd_hetero.horovod_build.edits.edit import Edit
from hvd_hetero.horovod_build.edits.joining import JOINING_EDITS
from hvd_hetero.horovod_build.edits.locks import LOCK_EDITS
from hvd_hetero.horovod_build.edits.meeting import FAILED_START_EDITS, MEETING_EDITS
from hvd_hetero.horovod_build.edits.places import PLACE_EDITS
from hvd_hetero.horovod_build.edits.questions import QUESTION_EDITS
from hvd_hetero.horovod_build.edits.ray import RAY_EDITS
from hvd_hetero.horovod_build.edits.rendezvous import ASKING_EDITS, RENDEZVOUS_EDITS
from hvd_hetero.horovod_build.edits.silence import SILENCE_EDITS
from hvd_hetero.horovod_build.edits.speed import SPEED_EDITS
from hvd_hetero.horovod_build.edits.waiting import WAITING_EDITS

__all__ = ["PACKAGE_EDITS", "SOURCE_EDITS", "Edit"]

SOURCE_EDITS: tuple[Edit, ...] = (
    *COMPILER_EDITS, *SPEED_EDITS, *TOKEN_EDITS, *CONNECTION_EDITS, *LOCK_EDITS, *WAITING_EDITS,
    *FAILED_START_EDITS, *ASKING_EDITS, *CUDA_EDITS
)  # fmt: skip
PACKAGE_EDITS: tuple[Edit, ...] = (
    *QUESTION_EDITS, *AUTHENTICATION_EDITS, *DISCOVERY_EDITS, *JOINING_EDITS, *PLACE_EDITS, *SILENCE_EDITS, *RAY_EDITS,
    *MEETING_EDITS, *RENDEZVOUS_EDITS
)  # fmt: skip
