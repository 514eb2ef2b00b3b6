// MCP Apps: answers the messages of the apps in frames. A frame is known by its window and the origin of its server.
const isDark = matchMedia("(prefers-color-scheme: dark)");
const getTheme = () => ({ theme: isDark.matches ? "dark" : "light" });
const findReady = (place) => [...place.querySelectorAll(".app iframe[data-ready]")];
const tell = (frame, message) => frame.contentWindow.postMessage({ jsonrpc: "2.0", ...message }, new URL(frame.src).origin);
isDark.addEventListener("change", () => findReady(document).forEach((frame) => tell(frame, { method: "ui/notifications/host-context-changed", params: getTheme() })));
// Lets the apps of a part of the page end, and removes it.
const endApps = (place) => findReady(place).map((frame) => tell(frame, { id: "end", method: "ui/resource-teardown", params: { reason: "The page no longer shows it." } }));
const removeWithApps = (block) => {
  Object.assign(block, { id: "", hidden: true }); // the id may be given again
  if (endApps(block).length) setTimeout(() => block.remove(), 500); else block.remove();
};
addEventListener("pagehide", () => endApps(document));
// Asks the person in the page, below the app.
const consent = (frame, question, words, yes) => new Promise((resolve) => {
  const place = frame.closest(".app"), card = document.createElement("form");
  place.querySelector("form")?.requestSubmit(place.querySelector("form button:last-of-type"));
  card.className = "card";
  const text = Object.assign(document.createElement("pre"), { textContent: words });
  const title = Object.assign(document.createElement("p"), { textContent: question });
  const answers = Object.assign(document.createElement("div"), { className: "answers" });
  for (const name of [yes, "Refuse"]) answers.append(Object.assign(document.createElement("button"), { textContent: name, value: name }));
  card.append(title, text, answers);
  card.addEventListener("submit", (event) => { event.preventDefault(); card.remove(); resolve(event.submitter?.value === yes); });
  place.append(card);
  const hidden = card.getBoundingClientRect().bottom + 12 - get("composer").getBoundingClientRect().top;
  if (hidden > 0 && frame.getBoundingClientRect().top < innerHeight) scrollBy(0, hidden); // the app is in view, its question was not
});
// Passes a request on to the app's own server: crow judges it, and shows it in the log.
const ask = (method) => async (frame, params) => {
  const used = document.activeElement === frame && !document.hidden;
  const body = JSON.stringify({ call: frame.dataset.call, method, params, used });
  const answer = await (await fetch(live.replace("live", "apps"), { method: "POST", body })).json();
  if ("error" in answer) throw new Error(answer.error);
  return answer.result;
};
const answers = {
  "ui/initialize": () => ({
    protocolVersion: "2026-01-26", hostInfo: { name: "crow", version: "1" }, hostCapabilities: { openLinks: {}, serverTools: {}, serverResources: {} },
    hostContext: {
      ...getTheme(), displayMode: "inline", availableDisplayModes: ["inline"], platform: "web", containerDimensions: { maxHeight: 600 },
    },
  }),
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
  "tools/call": ask("tools/call"),
  "resources/read": ask("resources/read"),
  "ui/request-display-mode": () => ({ mode: "inline" }),
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
