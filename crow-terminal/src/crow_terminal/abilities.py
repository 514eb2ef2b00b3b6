"""The capabilities of an agent beyond prompts."""

from msgspec import Struct


class Abilities(Struct):
    """The capabilities of the agent beyond prompts."""

    name: str = ""
    """Its name."""
    lists: bool = False
    """True if it lists stored sessions."""
    loads: bool = False
    """True if it loads stored sessions."""
    undoes: bool = False
    """True if it takes back turns together with the edits to files."""
    images: bool = False
    resumes: bool = False
    """True if it opens a stored session without sending what was said in it."""
    answers: tuple[str, ...] = ()
    """The additions that it accepts in the answer to a permission question: `reason`, `command`."""
    steers: bool = False
    """True if it takes words for the running turn."""
    backgrounds: bool = False
    """True if it sends what runs to the background."""
    lists_background: bool = False
    """True if it lists what runs in the background, and stops it."""
    completes: bool = False
    """True if it completes the arguments of its commands, and mentions of resources."""
