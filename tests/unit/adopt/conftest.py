"""What every test of protected trainers leaves."""

from tests.lone_process import ends_every_session

__all__ = ["ends_every_session"]
