// MCP Apps: answers the messages of the apps in frames. A frame is known by its window and the origin of its server.
const isDark = matchMedia("(prefers-color-scheme: dark)");
const getSize = (frame) => (document.fullscreenElement?.contains(frame) ? { displayMode: "fullscreen", containerDimensions: { width: frame.clientWidth, height: frame.clientHeight } } : { displayMode: "inline", containerDimensions: { maxHeight: 600 } });
const getTheme = () => ({ theme: isDark.matches ? "dark" : "light" });
const findReady = (place) => [...place.querySelectorAll(".app iframe[data-ready]")], findButton = (frame) => frame.closest(".app").querySelector("[data-full]");
const tell = (frame, message) => frame.contentWindow.postMessage({ jsonrpc: "2.0", ...message }, new URL(frame.src).origin);
isDark.addEventListener("change", () => findReady(document).forEach((frame) => tell(frame, { method: "ui/notifications/host-context-changed", params: getTheme() })));
// One app can fill the screen, if it says that it can. The browser wants an action of the person. Escape goes back, also in the app.
const toggle = (place) => (document.fullscreenElement ? document.exitFullscreen() : place.requestFullscreen().catch(() => null));
log.addEventListener("click", ({ target }) => { if ("full" in target.dataset) toggle(target.closest(".app")); });
document.addEventListener("keydown", ({ key }) => { if (key === "Escape" && document.fullscreenElement) toggle(); }); // most browsers do it
document.addEventListener("fullscreenchange", ({ target }) => {
  target.querySelector("[data-full]").textContent = document.fullscreenElement ? "Back" : "Full screen";
  target.querySelectorAll("iframe").forEach((frame) => tell(frame, { method: "ui/notifications/host-context-changed", params: getSize(frame) }));
});
// Lets the apps of a part of the page end, and removes it.
const endApps = (place) => findReady(place).map((frame) => tell(frame, { id: "end", method: "ui/resource-teardown", params: { reason: "The page no longer shows it." } }));
const removeWithApps = (block) => {
  Object.assign(block, { id: "", hidden: true }); // the id may be given again
  if (endApps(block).length) setTimeout(() => block.remove(), 500); else block.remove();
};
addEventListener("pagehide", () => endApps(document));
const build = (tag, textContent, more) => Object.assign(document.createElement(tag), { textContent, ...more });
// Asks the person in the page, below the app.
const consent = (frame, question, words, yes) => new Promise((resolve) => {
  const place = frame.closest(".app"), card = build("form", "", { className: "card" }), answers = build("div", "", { className: "answers" });
  place.querySelector("form")?.requestSubmit(place.querySelector("form button:last-of-type"));
  answers.append(...[yes, "Refuse"].map((name) => build("button", name, { value: name })));
  card.append(build("p", question), build("pre", words), answers);
  card.addEventListener("submit", (event) => { event.preventDefault(); card.remove(); resolve(event.submitter?.value === yes); });
  place.append(card);
  const hidden = card.getBoundingClientRect().bottom + 12 - get("composer").getBoundingClientRect().top;
  if (hidden > 0 && frame.getBoundingClientRect().top < innerHeight) scrollBy(0, hidden); // the app is in view, its question was not
});
// Passes a request on to crow, which judges it and shows it in the log.
const ask = (method) => async (frame, params) => {
  const body = JSON.stringify({ call: frame.dataset.call, method, params, used: document.activeElement === frame && !document.hidden });
  const answer = await (await fetch(live.replace("live", "apps"), { method: "POST", body })).json();
  if ("error" in answer) throw new Error(answer.error);
  return answer.result;
};
const answers = {
  "ui/initialize": (frame, { appCapabilities }) => {
    const can = document.fullscreenEnabled, wants = [appCapabilities?.availableDisplayModes].flat().includes("fullscreen");
    findButton(frame).hidden = !(can && wants);
    return {
      protocolVersion: "2026-01-26", hostInfo: { name: "crow", version: "1" },
      hostCapabilities: { openLinks: {}, serverTools: {}, serverResources: {}, updateModelContext: { text: {}, structuredContent: {} } },
      hostContext: { ...getTheme(), ...getSize(frame), availableDisplayModes: can ? ["inline", "fullscreen"] : ["inline"], platform: "web" },
    };
  },
  "ui/message": async (frame, params) => {
    const parts = [params.content].flat(), words = parts.map((part) => part?.text).join("\n");
    if (params.role !== "user" || !words || parts.some((part) => part?.type !== "text" || typeof part.text !== "string") || words.length > 4000) throw new Error("Invalid message format");
    if (!(await consent(frame, "The app wants to say to crow, in your name:", words, "Say it"))) throw new Error("Message sending denied");
    send({ do: "prompt", text: words });
    return {};
  },
  "ui/open-link": async (frame, { url }) => {
    if (typeof url !== "string" || !/^https?:\/\/\S+$/.test(url) || url.length > 2000) throw new Error("Invalid URL");
    if (!(await consent(frame, "The app wants to open this address:", url, "Open it"))) throw new Error("Link opening denied by user");
    open(url, "_blank", "noopener,noreferrer");
    return {};
  },
  ...Object.fromEntries(["tools/call", "resources/read", "ui/update-model-context"].map((method) => [method, ask(method)])),
  "ui/request-display-mode": async (frame, { mode }) => {
    const is = ["inline", "fullscreen"].includes(mode) && mode !== getSize(frame).displayMode && document.activeElement === frame;
    if (is && !findButton(frame).hidden) await toggle(frame.closest(".app"));
    return { mode: getSize(frame).displayMode };
  },
  "ping": () => ({}),
};
const notes = {
  "ui/notifications/initialized": (frame) => {
    const { input, result } = frame.dataset;
    frame.dataset.ready = "yes";
    tell(frame, { method: "ui/notifications/tool-input", params: { arguments: JSON.parse(input) } });
    tell(frame, { method: "ui/notifications/tool-result", params: JSON.parse(result) });
  },
  "ui/notifications/size-changed": (frame, { height }) => {
    if (Number.isFinite(height)) frame.style.height = `${Math.min(Math.max(height, 40), 600)}px`;
  },
};
addEventListener("message", async (event) => {
  const frame = [...document.querySelectorAll(".app iframe")].find((each) => each.contentWindow === event.source);
  const message = event.data;
  if (!frame || event.origin !== new URL(frame.src).origin || message?.jsonrpc !== "2.0" || typeof message.method !== "string") return;
  const params = message.params && typeof message.params === "object" ? message.params : {};
  if (message.id === undefined) { if (Object.hasOwn(notes, message.method)) notes[message.method](frame, params); return; }
  try {
    if (!Object.hasOwn(answers, message.method)) throw new Error(`crow does not let apps use ${message.method.slice(0, 80)}`);
    tell(frame, { id: message.id, result: await answers[message.method](frame, params) });
  } catch (error) {
    tell(frame, { id: message.id, error: { code: -32000, message: error.message } });
  }
});
