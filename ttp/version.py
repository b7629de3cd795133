"""The version of this distribution (PURE)."""

VERSION = "0.1.0"
