"""Edits by which a rank that gives up closes its connections, so that no other one waits for it.

Where a rank dies, those that exchange messages with it see their connections break, and give up. The others wait for
those, whose connections stay open: Horovod closes the ones of the job as a whole, and forgets those of process sets,
over which all collectives go. So they wait for ``HOROVOD_GLOO_TIMEOUT_SECONDS`` (30) in vain. And a process that was
forked from a rank, as a loader's worker is, holds its connections too, so that closing them tells no other rank.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["CONNECTION_EDITS"]

CONNECTION_EDITS = (
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        """void GlooContext::Finalize() {
  if (!enabled_) {
    return;
  }
""",
        "void GlooContext::Finalize() {\n",  # enabled is the job's as a whole alone
        "connections of process sets are never closed, and the other ranks wait for what will not come",
    ),
    Edit(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        """          device_->unregisterDescriptor(fd_, this);
        }
        ::close(fd_);
""",
        """          device_->unregisterDescriptor(fd_, this);
        }
        ::shutdown(fd_, SHUT_RDWR);
        ::close(fd_);
""",
        "a child of the process holds the connection open",
    ),
)
