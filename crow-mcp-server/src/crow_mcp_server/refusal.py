"""What the model is told when a call cannot be done."""

import logging

from fastmcp.exceptions import ToolError


class ToolRefusal(ToolError):
    """Ends a call with an `isError` result that says what to do next. No fault of the server, so not logged as one."""

    def __init__(self, message: str) -> None:
        super().__init__(message, log_level=logging.DEBUG)
