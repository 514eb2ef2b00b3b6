// MCP Apps: answers the messages of the apps in frames. A frame is known by its window and the origin of its server.
const tell = (frame, message) => frame.contentWindow.postMessage({ jsonrpc: "2.0", ...message }, new URL(frame.src).origin);
// Asks the person in the page, below the app.
const consent = (frame, words) => new Promise((resolve) => {
  const place = frame.closest(".app"), card = document.createElement("form");
  place.querySelector("form")?.requestSubmit(place.querySelector("form button:last-of-type"));
  card.className = "card";
  const text = Object.assign(document.createElement("pre"), { textContent: words });
  const title = Object.assign(document.createElement("p"), { textContent: "The app wants to say to crow, in your name:" });
  const answers = Object.assign(document.createElement("div"), { className: "answers" });
  for (const name of ["Say it", "Refuse"]) answers.append(Object.assign(document.createElement("button"), { textContent: name, value: name }));
  card.append(title, text, answers);
  card.addEventListener("submit", (event) => { event.preventDefault(); card.remove(); resolve(event.submitter?.value === "Say it"); });
  place.append(card);
  const hidden = card.getBoundingClientRect().bottom + 12 - get("composer").getBoundingClientRect().top;
  if (hidden > 0 && frame.getBoundingClientRect().top < innerHeight) scrollBy(0, hidden); // the app is in view, its question was not
});
const answers = {
  "ui/initialize": () => ({
    protocolVersion: "2026-01-26", hostInfo: { name: "crow", version: "1" }, hostCapabilities: {},
    hostContext: {
      theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light", displayMode: "inline",
      availableDisplayModes: ["inline"], platform: "web", containerDimensions: { maxHeight: 600 },
    },
  }),
  "ui/message": async (frame, params) => {
    const parts = [params.content].flat(), words = parts.map((part) => part?.text).join("\n");
    if (params.role !== "user" || !words || parts.some((part) => part?.type !== "text" || typeof part.text !== "string") || words.length > 4000) throw new Error("Invalid message format");
    if (!(await consent(frame, words))) throw new Error("Message sending denied");
    send({ do: "prompt", text: words });
    return {};
  },
  "ui/request-display-mode": () => ({ mode: "inline" }),
  "ping": () => ({}),
};
const notes = {
  "ui/notifications/initialized": (frame) => {
    const { input, result } = frame.dataset;
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
