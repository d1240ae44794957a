"""What a user sees when the command line, the configuration or a run is at fault."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from rlpost.errors import ConfigError, RlpostError, StoppedError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Hydra otherwise prints errors its own way and exits with 1 before they can be explained.
os.environ["HYDRA_FULL_ERROR"] = "1"
# conf/hydra/launcher/ sets the keys of the launchers' own schemas, which is what is wanted.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against")
# It is refused, as `--config-dir` is, when the configuration is loaded.
warnings.filterwarnings("ignore", message="provider=hydra.searchpath .* is not available")


@contextmanager
def readable_errors() -> Iterator[None]:
    """Prints expected errors to stderr without a traceback and exits: 2 config, 1 run, 130 Ctrl-C.

    Anything else is a fault of the program and keeps its traceback.
    """
    try:
        yield
    except ConfigError as error:
        from rlpost.overrides import with_the_rest

        leave(str(with_the_rest(error, sys.argv[1:])), 2)
    except (HydraException, OmegaConfBaseException) as error:
        from rlpost.overrides import explain

        leave(explain(error, sys.argv[1:]), 2)
    except ValueError as error:
        if "Config group override" not in str(error):  # Hydra's answer to group=null
            raise
        from rlpost.overrides import explain

        leave(explain(error, sys.argv[1:]), 2)
    except OSError as error:
        if error.errno in DISK_FULL:
            leave(f"the disk is full: {error}; free some space or set output_dir elsewhere", 1)
        if not is_of_output_dir(error):
            raise
        leave(str(ConfigError([unwritable(error)])), 2)
    except StoppedError as error:
        leave(str(error), 130)
    except RlpostError as error:
        leave(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        leave("interrupted", 130)


def unwritable(error: OSError) -> str:
    """`output_dir: can't make '/proc/x' (No such file or directory); set it to ...`"""
    made = f"output_dir: can't make {error.filename!r} ({error.strerror})"
    return f"{made}; set it to a folder that can be written"


def is_of_output_dir(error: OSError) -> bool:
    """Whether Hydra, before it calls this program, could not make the run's or sweep's folder."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    outside = [frame for frame in frames if frame.f_globals["__name__"] != "pathlib"]
    asked_by_hydra = outside[-1].f_globals["__name__"].startswith("hydra.")
    return asked_by_hydra and any(frame.f_code.co_name == "mkdir" for frame in frames)


def leave(message: str, code: int) -> NoReturn:
    print(f"\n{message}", file=sys.stderr, flush=True)
    raise SystemExit(code)
