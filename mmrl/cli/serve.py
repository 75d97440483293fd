"""`mmrl serve`: what a run has learned, behind the protocol that clients of its kind of model speak."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from mmrl.job import Job
from mmrl.runtime.installation import extra_command

if TYPE_CHECKING:
    from mmrl.policies.vla.policy import VisionLanguageActionPolicy

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve_model(options: argparse.Namespace, job: Job) -> None:
    """Serves the policy of `job` until Ctrl-C. Raises UserError for a model without a protocol, and for an address
    that cannot be listened at."""
    kind, key = job.config.model.type, read_key(options)
    name = Path(options.model).resolve().name if Path(options.model).is_dir() else options.model
    from mmrl.policies.vla.policy import VisionLanguageActionPolicy  # these are slow to import
    from mmrl.policies.vlm.policy import VisionLanguagePolicy

    if isinstance(job.policy, VisionLanguagePolicy):
        from mmrl.serving.chat import serve

        job.policy.drafter.conversations = None  # the caller is the environment
        limit = job.policy.tokens.max_response_length
        serve(job.policy, name, limit, host=options.host, port=options.port, key=key)
    elif isinstance(job.policy, VisionLanguageActionPolicy):
        serve_robot(job.policy, name, options, key)
    else:
        raise UserError(f"mmrl serve is for models that answer in text or act; this one has model.type={kind}")


def serve_robot(policy: VisionLanguageActionPolicy, name: str, options: argparse.Namespace, key: str | None) -> None:
    """Serves a policy that acts. Raises UserError where the packages of the protocol are missing."""
    try:
        from mmrl.serving.robot import serve
    except ModuleNotFoundError as error:
        raise UserError(f"serving a robot's policy needs {error.name}; {extra_command('serve')}") from None
    serve(policy, name, host=options.host, port=options.port, key=key)


def read_key(options: argparse.Namespace) -> str | None:
    """Returns the key that callers send. Raises UserError for a variable that is not set, and for an address that is
    open to others without a key."""
    key = None if options.key_env is None else os.environ.get(options.key_env)
    if options.key_env is not None and not key:
        raise UserError(f"--key-env={options.key_env}: the environment has no such variable, or it is empty")
    if key is None and options.host not in LOOPBACK:
        raise UserError(f"--host={options.host} is open to others; name a key with --key-env")
    return key
