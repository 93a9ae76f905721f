"""The exceptions of shardwise.

    ShardwiseError
    ├── LayoutError        (ValueError)           a placement, mesh or shape that does not fit
    ├── ArgumentError      (TypeError)            a value of the wrong kind
    ├── BatchError         (ValueError)           a batch that does not fit the tables it is for
    ├── IdRangeError       (IndexError)           an id outside its table
    ├── MixedTensorsError  (NotImplementedError)  a DTensor met a plain tensor
    ├── LeafError          (RuntimeError)         a tensor with a history where a leaf is needed
    ├── UnsupportedError   (NotImplementedError)  an op or a combination without a rule
    ├── CollectiveError    (RuntimeError)         a collective that failed, here or elsewhere
    ├── WorldError         (RuntimeError)         a process group, mesh or tensor of the wrong world
    ├── PlanError          (RuntimeError)         entries of a plan that contradict each other
    ├── PathError          (KeyError)             a path of a plan that is empty or leads nowhere
    ├── RankMismatchError  (RuntimeError)         ranks that disagree where they must not
    ├── RedistributionError (RuntimeError)        communication that strict mode does not allow
    ├── CheckpointError    (RuntimeError)         a checkpoint that is damaged or unfit
    ├── LaunchError        (RuntimeError)         a process of a launched job that ended or hangs
    └── TorchVersionError  (RuntimeError)         a torch that lacks what a feature is built on

    ReplicationWarning     (UserWarning)          an op without a rule gathered its operands
    CheckpointWarning      (UserWarning)          a checkpoint was loaded, but not as asked

Every error derives from the builtin that ordinary code would catch. A message says what was asked,
what was found and what to do.
"""

from collections.abc import Sequence


def printable(text: str) -> str:
    """The text with terminal control characters escaped; line breaks stay.

    Names in files are chosen by whoever wrote the file.

    >>> print(printable("a\\x1b[2Jb"))
    a\\x1b[2Jb
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def some_of(names: Sequence[str], between: str = ", ") -> str:
    """The first eight names, and how many more there are.

    >>> some_of([f"t{i}" for i in range(40)])
    't0, t1, t2, t3, t4, t5, t6, t7 and 32 more'
    """
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return between.join(names[:8]) + more


class ShardwiseError(Exception):
    """Root of all errors that shardwise raises on purpose."""


class LayoutError(ShardwiseError, ValueError):
    """A placement, mesh or shape does not fit the tensor it was given for."""


class ArgumentError(ShardwiseError, TypeError):
    """A value of the wrong kind was given."""


class BatchError(ShardwiseError, ValueError):
    """A batch of ids does not fit the tables that it is meant for."""


class IdRangeError(ShardwiseError, IndexError):
    """An id is outside its table."""


class MixedTensorsError(ShardwiseError, NotImplementedError):
    """A DTensor and a plain tensor meet in one call, and the plain one has no layout.

    Not a TypeError: Python's operators swallow those.
    """


class LeafError(ShardwiseError, RuntimeError):
    """A tensor has a history in autograd where a leaf is needed."""


class UnsupportedError(ShardwiseError, NotImplementedError):
    """No rule covers the op or the combination of layouts."""


class CollectiveError(ShardwiseError, RuntimeError):
    """A collective failed, on this rank or on another one that it waited for."""


class WorldError(ShardwiseError, RuntimeError):
    """A process group, a mesh or a tensor belongs to another world, or to none."""


class PlanError(ShardwiseError, RuntimeError):
    """Entries of a plan contradict each other."""


class PathError(ShardwiseError, KeyError, AttributeError):
    """A path of a plan is empty or leads nowhere."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show the message in quotes


class RankMismatchError(ShardwiseError, RuntimeError):
    """Ranks hold different values where one value was asked for."""


class RedistributionError(ShardwiseError, RuntimeError):
    """In strict mode, an op needs communication that the program did not ask for."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint cannot be written, is damaged or foreign, or does not fit the state.

    Its message may hold names from files: it is `printable`.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class LaunchError(ShardwiseError, RuntimeError):
    """A process of a launched job failed, died or did not answer in time."""


class TorchVersionError(ShardwiseError, RuntimeError):
    """This torch lacks a private name that the feature is built on."""


class ReplicationWarning(UserWarning):
    """Under `fallback("replicate")`, an op without a rule gathered its operands."""


class CheckpointWarning(UserWarning):
    """A checkpoint was loaded from an older save than asked for, or matched by position.

    Or a checkpoint was saved without the state of an optimizer that one of its modules has.
    """
