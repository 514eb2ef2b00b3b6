// A chat: shows the blocks that the server sends, and sends what is done on the page.
const policy = globalThis.trustedTypes?.createPolicy("crow", { createHTML: (html) => html }) ?? { createHTML: (html) => html };
const get = (id) => document.getElementById(id);
const log = get("log"), box = get("text"), menu = get("menu"), images = get("images");
const page = Math.random().toString(36).slice(2);
const shown = new Map(); // the HTML of each block
const outbox = new Map(); // the actions that have not arrived yet, by their numbers
let socket, number = 0, boot = "", news = "", looksForEnd = false, phase = "", completed = null, live = document.querySelector("[data-live]").dataset.live;

// The server escapes and cleans all HTML that it sends. What was unfolded stays unfolded.
const fill = (place, html) => {
  const open = [...place.querySelectorAll("details")].map((each) => each.open);
  place.innerHTML = policy.createHTML(html);
  place.querySelectorAll("details").forEach((each, at) => { if (at in open) each.open = open[at]; });
  place.querySelectorAll("iframe").forEach((each) => Object.assign(each, { sandbox: "allow-scripts allow-same-origin", src: `${location.protocol}//${location.hostname}:${each.dataset.src}` }));
};
const countOf = (block) => Number(block.id.slice(1));
const make = (id) => {
  const block = Object.assign(document.createElement("div"), { id });
  const [parent, part] = id.split(".");
  if (part) { (get(parent)?.querySelector("[data-in]") ?? log).append(block); return block; }
  let before = log.lastElementChild;
  while (before && countOf(before) > countOf(block)) before = before.previousElementSibling;
  if (before) before.after(block); else log.prepend(block);
  return block;
};
const put = (id, html) => {
  if (shown.get(id) === html) return;
  const block = get(id) ?? (html === null ? null : make(id));
  if (html === null) { shown.delete(id); if (block) removeWithApps(block); return; }
  shown.set(id, html);
  fill(block, html);
};
const values = {
  "@name": (text) => { document.title = text; },
  "@phase": (text) => {
    const before = phase;
    phase = document.body.dataset.phase = text;
    if (!before && document.activeElement === box) begin(); // it got the focus before the connection was there
    if (text === "ready") suggest();
  },
  "@commands": () => suggest(),
  "@session": (id) => { live = `/live/${id}`; history.replaceState(null, "", `/chat/${id}`); get("place")?.remove(); },
  "@go": (place) => { location.assign(place); },
  "@arrived": (last) => { for (const each of outbox.keys()) if (each <= Number(last)) outbox.delete(each); },
  "@edit": (text) => { box.value = [text, box.value].filter(Boolean).join("\n"); box.focus(); fit(); },
  "@problem": (text) => { const [id, ...words] = text.split(" "); get(id).querySelector("[role=alert]").textContent = words.join(" "); },
  "@menu": (html) => {
    const text = beforeCursor(), chosen = menu.querySelector("[aria-selected=true]"), at = [...menu.children].indexOf(chosen);
    fill(menu, html);
    if (text === completed || !text.startsWith(menu.firstElementChild?.dataset.for ?? "\n")) fill(menu, "");
    else if (at > 0 && menu.children[at]?.dataset.for === chosen.dataset.for) choose(at); // more of the same
  },
  "@boot": (id) => {
    if (boot && boot !== id && phase === "working") say(news = "crow web was started again while crow worked: the turn was stopped. All that was said and done until then is stored, and stands here. Say “go on” to go on.");
    boot = id;
  },
};
const receive = (batch) => {
  const follows = scrollY + innerHeight > document.documentElement.scrollHeight - 120;
  if ("@boot" in batch) values["@boot"](batch["@boot"]); // before the phase changes
  if ("@all" in batch) for (const id of [...shown.keys()]) if (!(id in batch)) put(id, /^b\d/.test(id) ? null : "");
  for (const [id, html] of Object.entries(batch)) {
    if (id[0] !== "@") put(id, html);
    else if (id !== "@boot") values[id]?.(html);
  }
  const says = Object.keys(batch).some((id) => /^b\d/.test(id));
  if (follows || (looksForEnd && says)) scrollTo(0, document.documentElement.scrollHeight);
  if (says) looksForEnd = false;
};

const say = (text) => { get("connection").textContent = text; };
const send = (action) => {
  const sent = { ...action, number: ++number };
  outbox.set(number, sent);
  if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(sent));
  setTimeout(() => { if (outbox.has(sent.number)) socket.close(); }, 8000); // as after a sleep of the device
};
const connect = () => {
  const own = socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${live}?page=${page}`);
  let opened = false;
  own.addEventListener("open", () => { for (const each of outbox.values()) own.send(JSON.stringify(each)); suggest(); });
  own.addEventListener("message", (event) => {
    if (!opened) { opened = true; say(news); }
    receive(JSON.parse(event.data));
  });
  own.addEventListener("close", async (event) => {
    if (own !== socket) return;
    if (event.code === 1008) return say(event.reason);
    say("The connection is lost; trying again …");
    const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
    if (answer?.status === 401) say("crow web was started again: open the address that it prints in this browser. This page goes on then.");
    setTimeout(connect, 1000);
  });
};
connect();
document.addEventListener("visibilitychange", () => { if (!document.hidden) send({ do: "look" }); });

// What forms hold: a field with several values is a list.
const read = (form, button) => {
  const action = { do: form.dataset.do };
  for (const [name, value] of new FormData(form, button)) {
    if (typeof value === "string") action[name] = name in action ? [action[name], value].flat() : value;
  }
  return action;
};
document.addEventListener("submit", (event) => {
  if (!event.target.dataset.do) return;
  event.preventDefault();
  const action = read(event.target, event.submitter);
  looksForEnd = action.do === "prompt" || action.do === "undo";
  if (event.target.id === "say") {
    action.images = [...images.querySelectorAll("img")].map((each) => each.src);
    if (!action.text.trim() && !action.images.length) return;
    box.value = "";
    images.replaceChildren();
    fill(menu, "");
    fit();
    say(news = "");
  }
  send(action);
});
document.addEventListener("change", (event) => {
  if (event.target.form && "auto" in event.target.form.dataset) event.target.form.requestSubmit();
});

// The editor: completion, Enter to send, images. Its text survives when a phone drops the page.
const key = `text ${live}`;
const fit = () => { box.style.height = "auto"; box.style.height = `${box.scrollHeight + 2}px`; sessionStorage.setItem(key, box.value); };
const beforeCursor = () => box.value.slice(0, box.selectionStart);
const complete = (option) => {
  const { insert, replaces, for: typed } = option.dataset; // more may have been typed meanwhile
  box.setRangeText(insert, typed.length - Number(replaces), box.selectionStart, "end");
  completed = beforeCursor();
  fill(menu, "");
  box.focus();
};
const choose = (step) => {
  const options = [...menu.children], at = options.findIndex((each) => each.ariaSelected === "true");
  options[at].ariaSelected = null;
  const next = options[(at + step + options.length) % options.length];
  next.ariaSelected = "true";
  next.scrollIntoView({ block: "nearest" });
};
box.value = sessionStorage.getItem(key) ?? "";
const suggest = () => {
  const text = beforeCursor();
  if (document.activeElement !== box || text === completed) return;
  if (/^\/[^\n]*$|(^|\s)@\S*$/.test(text)) send({ do: "complete", text }); else fill(menu, "");
};
const begin = () => { if (phase === "viewing" || phase === "new") send({ do: "open" }); };
box.addEventListener("input", () => { completed = null; fit(); suggest(); });
box.addEventListener("focus", begin);
box.addEventListener("keydown", (event) => {
  const has = menu.childElementCount > 0;
  if (event.isComposing) return;
  if (has && (event.key === "ArrowDown" || event.key === "ArrowUp")) choose(event.key === "ArrowDown" ? 1 : -1);
  else if (has && (event.key === "Enter" || event.key === "Tab") && !event.shiftKey) complete(menu.querySelector("[aria-selected=true]"));
  else if (has && event.key === "Escape") { completed = beforeCursor(); fill(menu, ""); }
  else if (event.key === "Escape" && phase === "working") send({ do: "cancel" });
  else if (event.key === "Enter" && !event.shiftKey && !matchMedia("(pointer: coarse)").matches) {
    get("say").requestSubmit(event.altKey && phase === "working" ? get("say").elements.later : get("say").querySelector(".main"));
  } else return;
  event.preventDefault();
});
menu.addEventListener("click", (event) => { const option = event.target.closest("[data-insert]"); if (option) complete(option); });

const LONGEST = 1568; // pixels of an image's longer side; models see no more
const attach = async (files) => {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const bitmap = await createImageBitmap(file).catch(() => null);
    if (!bitmap) { say(`${file.name} cannot be read as an image.`); continue; }
    const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
    const canvas = Object.assign(document.createElement("canvas"), { width: bitmap.width * scale, height: bitmap.height * scale });
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const image = Object.assign(document.createElement("img"), { src: canvas.toDataURL("image/jpeg", 0.85), alt: file.name });
    const button = Object.assign(document.createElement("button"), { type: "button", ariaLabel: `Remove ${file.name}` });
    button.append(image);
    button.addEventListener("click", () => button.remove());
    images.append(button);
  }
};
for (const each of document.querySelectorAll("input[type=file]")) {
  each.addEventListener("change", async () => { await attach(each.files); each.value = ""; });
}
box.addEventListener("paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); } });
