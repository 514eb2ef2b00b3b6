"""The styles of everything that is shown."""

from collections.abc import Mapping

from msgspec import Struct


class Theme(Struct, frozen=True):
    """The styles, as parameters of the escape sequence SGR, and the colours of code."""

    accent: str = "36"
    dim: str = "2"
    thought: str = "2;3"
    good: str = "32"
    bad: str = "31"
    warning: str = "33"
    prompt: str = "1"
    added: str = "32"
    removed: str = "31"
    code: str = "ansi_dark"
    """The Pygments style of code; empty for none."""
    plain: str = ""

    def style(self, name: str, text: str) -> str:
        """Return a text in one of the styles."""
        codes: str = getattr(self, name)
        return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


THEMES: dict[str, Theme] = {
    "dark": Theme(),
    "light": Theme(accent="34", warning="35", code="ansi_light"),
    "vivid": Theme(accent="1;35", added="30;42", removed="30;41", code="monokai"),
    "mono": Theme("1", "", "", "", "1", "1", "1", "", "", ""),
}
"""The themes by name. The first two use the colours that the terminal is set to; `mono` uses none."""


def choose_theme(name: str, env: Mapping[str, str]) -> Theme:
    """Return the theme of this name; `mono` if the variable NO_COLOR is set.

    Without a name it is `light` where the terminal's variable COLORFGBG says that the background is, else `dark`.
    """
    is_light = env.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    return THEMES["mono" if env.get("NO_COLOR") else name if name in THEMES else "light" if is_light else "dark"]
