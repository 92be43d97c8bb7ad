"""The errors that end a command, and the exit codes they end it with."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_RESUMABLE = 75  # sysexits.h EX_TEMPFAIL: interrupted, the same command goes on
EXIT_TAKEN_OVER = 76  # of the role `learner` alone: another one goes on with the run, and this one must not come back

EXIT_ALONE = 77  # of the role `learner` alone: nobody samples for it, and started again it would only wait again


class UsageError(Exception):
    """A wrong command, config or input file. The message is one sentence that names the key or the file."""


class RunFailed(Exception):
    """The run cannot go on. The message is one sentence that names the part and the cause."""

    exit_code = EXIT_FAILED


class BucketError(OSError):
    """A verb of a bucket failed for good. The message is one sentence: verb, key, bucket (no credentials), cause."""
