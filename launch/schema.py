"""The JSON schema of configuration files, for editors; generated from the models."""

from __future__ import annotations

import json

from crossdock.launch.models import Config

__all__ = ["schema_text"]


def schema_text() -> str:
    """The content of ``configs/config.schema.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(schema | Config.model_json_schema(), indent=2) + "\n"
