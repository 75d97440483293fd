"""`mmrl serve`: serves a trained policy. Text models speak OpenAI's chat protocol, robot policies openpi's."""

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
    """Serves the policy of `job` until Ctrl-C.

    Raises UserError if the model neither answers in text nor acts, or the server cannot listen at host and port.
    """
    key = read_key(options)
    name = Path(options.model).resolve().name if Path(options.model).is_dir() else options.model
    from mmrl.policies.vla.policy import VisionLanguageActionPolicy  # these are slow to import
    from mmrl.policies.vlm.policy import VisionLanguagePolicy

    if isinstance(job.policy, VisionLanguagePolicy):
        from mmrl.serving.chat import serve

        job.policy.drafter.conversations = None  # the other turns come from the client, not from an environment
        limit = job.policy.tokens.max_response_length
        serve(job.policy, name, limit, host=options.host, port=options.port, key=key)
    elif isinstance(job.policy, VisionLanguageActionPolicy):
        serve_robot(job.policy, name, options, key)
    else:
        raise UserError(
            "mmrl serve is for models that answer in text or control a robot; this one has "
            f"model.type={job.config.model.type}"
        )


def serve_robot(policy: VisionLanguageActionPolicy, name: str, options: argparse.Namespace, key: str | None) -> None:
    """Serves a robot policy. Raises UserError if the packages that openpi's protocol needs are not installed."""
    try:
        from mmrl.serving.robot import serve
    except ModuleNotFoundError as error:
        raise UserError(
            f"serving a robot's policy needs {error.name}; install it with: {extra_command('serve')}"
        ) from None
    serve(policy, name, host=options.host, port=options.port, key=key)


def read_key(options: argparse.Namespace) -> str | None:
    """Returns the API key that clients have to send; None if there is none.

    Raises UserError if the variable that --key-env names is not set, or --host is reachable from other machines and
    there is no key.
    """
    key = None if options.key_env is None else os.environ.get(options.key_env)
    if options.key_env is not None and not key:
        raise UserError(
            f"--key-env={options.key_env}: this environment variable is not set, or empty; export it with the API key"
        )
    if key is None and options.host not in LOOPBACK:
        raise UserError(
            f"--host={options.host} may be reached from other machines, so an API key is needed; store one in an "
            "environment variable, and name that with --key-env"
        )
    return key
