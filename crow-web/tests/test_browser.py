"""The pages in Chromium."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Page

    from conftest import Site

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("database", ["sqlite"], indirect=True)]


async def test_a_session_is_opened_from_the_list(page: "Page", site: "Site"):
    await page.get_by_role("link", name="Plan the garden").click()
    await page.wait_for_url(f"**/session/{site.sessions[0]}")
    assert "All is done." in await page.inner_text("main")
