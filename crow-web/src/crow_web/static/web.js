// j and k go to the next and the previous prompt of a person, / to the search.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
  if (event.key !== "j" && event.key !== "k") return;
  const prompts = [...document.querySelectorAll("article.user")];
  const step = event.key === "j" ? 1 : -1, here = prompts.indexOf(document.activeElement);
  const tops = prompts.map((prompt) => prompt.getBoundingClientRect().top - 64);
  const near = step > 0 ? tops.findIndex((top) => top > 0) : tops.findLastIndex((top) => top < 0);
  const prompt = prompts[here < 0 ? near : here + step];
  if (prompt) { prompt.scrollIntoView(); prompt.focus({ preventScroll: true }); }
});
// Copies the text that a button names.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "Copied";
});
// Folds what a narrow screen has no room for.
if (innerWidth < 960) document.querySelectorAll("[data-narrow]").forEach((each) => each.removeAttribute("open"));
// Opens the message that the address names, if it is in a folded part.
const named = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
if (named) named.closest("details")?.setAttribute("open", "");
