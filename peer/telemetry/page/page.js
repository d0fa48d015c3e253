// Ask the daemon for status, history and events, and show them. Nothing here changes anything.
// Texts of peers are only ever set as text, never as markup.

import { clock, legendMark, lineChart, timeline } from "./charts.js";

const STATUS_EVERY_MS = 2000, HISTORY_EVERY_MS = 5000, SERIES_EVERY_MS = 20000, RECORDED_EVERY_MS = 3600e3;
const IDLE_ROUNDS = 3, IDLE_MIN_S = 10;  // as in overview.py
const SHOWN_EVENTS = 200, ROUNDS_JUDGED = 20, OWN_STYLES = 24;
const HISTORY_KINDS = ["fork", "met", "rollback", "yield", "banned", "revoked", "equivocation", "forged", "diverged"];

const at = (id) => document.getElementById(id);
const state = { status: null, history: null, recorded: false, chosen: new Set(), kinds: new Set(), limit: SHOWN_EVENTS, series_ms: 0, events: [], ahead_s: 0 };

// The time by the daemon's clock, whose times all others here are: that of a browser may be wrong.
const daemonNow = () => Date.now() / 1000 + state.ahead_s;

// ---------------------------------------------------------------- words and numbers

const number = (v, digits = 3) => Number(v.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });

function scaled(value, step, units) {
  let place = 0;
  while (place < units.length - 1 && value >= step) { value /= step; place += 1; }
  return `${place ? number(value) : Math.round(value)} ${units[place]}`;
}
const size = (v) => scaled(v, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
const memory = (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const rate = (v) => scaled(8 * v, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]);
const compact = (v) => v.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
const plain = (v) => (v === 0 ? "0" : number(v, 4));
const lossText = (v) => (v === undefined ? "–" : plain(v));

function duration(s) {
  if (s < 1) return `${number(1000 * s, 2)} ms`;
  if (s < 120) return `${number(s)} s`;
  if (s < 7200) return `${number(s / 60)} min`;
  if (s < 172800) return `${number(s / 3600)} h`;
  return `${number(s / 86400)} days`;
}

function full(unix_s) {
  const day = new Date(unix_s * 1000).toDateString() === new Date(daemonNow() * 1000).toDateString();
  return (day ? "" : `${new Date(unix_s * 1000).toLocaleDateString([], { month: "short", day: "numeric" })} `) + clock(unix_s);
}


// ---------------------------------------------------------------- elements

function h(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "scope") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

function table(id, heads, rows, caption = "") {
  const head = h("tr", {}, ...heads.map((text) => h("th", { scope: "col", className: text.startsWith(">") ? "number" : "" }, text.replace(">", ""))));
  const body = rows.map(({ cells, className = "" }) =>
    h("tr", { className }, ...cells.map((cell, i) => {
      const is_number = heads[i].startsWith(">");
      if (i === 0) return h("th", { scope: "row" }, cell);
      return h("td", { className: is_number ? "number" : heads[i] === "What" ? "text" : "" }, cell);
    })));
  const parts = [h("thead", {}, head), h("tbody", {}, ...body)];
  if (caption) parts.unshift(h("caption", {}, caption));
  at(id).replaceChildren(...parts);
}

function pairs(id, found) {
  at(id).replaceChildren(...found.filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
}

// Each name with its value in a box of its own.
function tiles(id, found) {
  at(id).replaceChildren(...found.filter(([, text]) => text).map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
}

function set(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

// ---------------------------------------------------------------- what follows from the rows

const rowsOf = (peer) => (state.history?.rounds[peer] ?? []).slice(-ROUNDS_JUDGED);
const roundsIn = (rows) => rows.reduce((sum, row) => sum + row.last - row.first + 1, 0);
const mean = (rows, name) => rows.reduce((sum, row) => sum + (row[name] ?? 0), 0) / Math.max(1, roundsIn(rows));
const peersKnown = () => Object.keys(state.history?.rounds ?? {});
const newestRound = () => Math.max(0, ...present().map((peer) => rowsOf(peer).at(-1)?.last ?? 0));
// Who has sent a row lately (findings.py), and is in the view. Of a recorded run nobody says who is, and
// a daemon that is in no view does not know.
function isGone(peer) {
  const members = state.status?.members ?? [];
  const is_member = !members.length || members.some((member) => member.peer === peer);
  return !is_member || !state.history.present.includes(peer);
}
const present = () => peersKnown().filter((peer) => !isGone(peer));

// Time per round over the last rows of whoever has most of them: pauses count, too.
function roundTime() {
  const best = present().map(rowsOf).sort((a, b) => roundsIn(b) - roundsIn(a))[0];
  return best?.length ? mean(best, "took_s") : 0;
}

function grown(peer, name) {
  const rows = rowsOf(peer).filter((row) => row[name] !== undefined);
  const span_s = rows.length ? rows.at(-1).unix_s - rows[0].unix_s : 0;
  const totals = rows.map((row) => row[name]); // one that fell has begun anew
  const each = totals.slice(1).map((now, place) => (now >= totals[place] ? now - totals[place] : now));
  return span_s > 0 ? each.reduce((sum, more) => sum + more, 0) / span_s : 0;
}

const tokensPerSecond = () => present().reduce((sum, peer) => sum + grown(peer, "tokens"), 0);
const tokensSoFar = () => Object.values(state.history?.totals ?? {}).reduce((sum, t) => sum + t.tokens, 0);

function eta(kind, goal) {
  const [now, per_s] = kind === "round" ? [state.status?.round ?? newestRound(), roundTime() ? 1 / roundTime() : 0] : [tokensSoFar(), tokensPerSecond()];
  if (!(goal > 0)) return kind === "tokens" && !now ? "no trainer has reported tokens" : "say how many, and when it is done stands here";
  if (now >= goal) return `reached: ${compact(now)} so far`;
  if (!per_s) return kind === "tokens" ? "no trainer has reported tokens lately" : "no round yet";
  const left_s = (goal - now) / per_s;
  const when = state.recorded ? "" : ` at ${full(daemonNow() + left_s)}`;
  const since_s = state.status?.last_commit_unix_s ? daemonNow() - state.status.last_commit_unix_s : 0;
  const idle = since_s > Math.max(IDLE_MIN_S, IDLE_ROUNDS * roundTime()) ? `; but no round has come for ${duration(since_s)}` : "";
  return `in ${duration(left_s)}${idle ? "" : when}, at ${kind === "round" ? `${duration(1 / per_s)} per round` : `${compact(per_s)} tokens per second`}${idle}`;
}

// ---------------------------------------------------------------- at a glance, peers

function showStatus() {
  const status = state.status;
  set("run", status ? `run ${status.run}` : "a recorded run");
  document.title = status ? `${status.run}: round ${status.round}` : "recorded run";
  set("who", status ? `seen by ${status.peer}, ${status.phase}, up ${duration(status.uptime_s)}` : "");
  const alarm = !status ? "" : status.fork ? `This is a fork: lineage ${status.lineage} went on without a majority.` : "";
  at("alarm").hidden = !alarm;
  set("alarm", alarm);
  showGlance();
  if (!status) {
    pairs("plan", [["Plan", lastEvent("plan") || "of a recorded run there are the events only, see below"], ["Checkpoint", lastEvent("checkpoint")]]);
    return;
  }
  const admission = status.admission.mode === "authority" ? "by an authority" : "by the run secret";
  pairs("plan", [
    ["Plan", status.layout || "no round yet"],
    ["Checkpoint", status.checkpoint || "none is written by this peer"],
    ["Remembers", status.durable],
    ["Survives", status.survives],
    ["Policy", status.policy],
    ["Admission", admission],
    ["Reach", status.reach.text],
    ["State", status.digest ? `${status.digest.slice(0, 16)} after round ${status.round}` : ""],
    ["Left out", status.left_out],
    ["Last error", status.last_error ? `${status.last_error} (${full(status.last_error_unix_s)})` : "none"],
  ]);
}

const lastEvent = (kind) => state.events.findLast((event) => event.kind === kind)?.text ?? "";

// What a round should take, and by how much the median of the last ones differs, as in `atoll status`.
function predicted(times) {
  if (!times?.predicted_s) return "";
  const beyond = Math.round(100 * (times.measured_s / times.predicted_s - 1));
  return `${duration(times.predicted_s)} (${beyond < 0 ? "−" : "+"}${Math.abs(beyond)} %)`;
}

function showGlance() {
  const { status, history } = state;
  const [losses, heldout] = ["loss", "heldout_loss"].map((name) => present().map((peer) => history.last[peer][name]).filter((v) => v !== undefined));
  const training = status?.members.filter((member) => member.attached).length;
  const members = status ? `${status.members.length}` : `${present().length}`;
  tiles("glance", [
    ["Round", (status?.round || newestRound()).toLocaleString("en")],
    ["Peers", training ? `${members}, ${training} training` : members],
    ["Time per round, mean", roundTime() ? duration(roundTime()) : "–"],
    ["Median of the last", status?.round_time ? duration(status.round_time.measured_s) : ""],
    ["Predicted", predicted(status?.round_time)],
    [heldout.length ? "Training loss, mean" : "Loss, mean", losses.length ? plain(average(losses)) : "–"],
    ["Held-out loss, mean", heldout.length ? plain(average(heldout)) : ""],
    ["Tokens", tokensSoFar() ? compact(tokensSoFar()) : ""],
    ["Tokens per second", tokensPerSecond() ? compact(tokensPerSecond()) : ""],
    ["Sent by all", history ? size(Object.values(history.totals).reduce((sum, t) => sum + t.sent.reduce((a, b) => a + b, 0), 0)) : "–"],
  ]);
  set("waiting", status ? status.waiting : `recorded until ${history ? full(history.newest_unix_s) : "…"}`);
  set("slow", history ? history.slow.text : "…");
  set("eta", eta(at("goal-kind").value, Number(at("goal").value.replace(/[,_ ]/g, ""))));
}

function showPeers() {
  const { history, status } = state;
  const members = new Map((status?.members ?? []).map((member) => [member.peer, member]));
  const names = [...new Set([...members.keys(), ...present(), ...peersKnown()])];
  const has_heldout = names.some((peer) => history.last[peer]?.heldout_loss !== undefined);
  const rows = names.map((peer) => {
    const found = rowsOf(peer), last = history.last[peer] ?? {}, member = members.get(peer);
    const took = mean(found, "took_s"), share = (name) => (took ? `${duration(mean(found, name))} (${Math.round((100 * mean(found, name)) / took)} %)` : "–");
    const late = [...new Set(found.filter((row) => row.wait_s > 0.05 * row.took_s).map((row) => row.late).filter(Boolean))];
    const way = member?.via === "punched" ? ", punched" : member?.via ? `, via ${member.via}` : "";
    const reach = (member?.outbound ? ", outbound" : "") + way;
    const role = member ? (member.coordinator ? "coordinator" : member.role === "replica" ? "member" : member.role) + reach : isGone(peer) || status ? "gone" : last.phase ?? "";
    const steps = grown(peer, "steps");
    return {
      className: history.slow.peer === peer ? "slow" : role === "gone" ? "gone" : "",
      cells: [
        peer + (member?.you ? " (this)" : ""), role, (last.last ?? member?.round ?? "–").toLocaleString("en"),
        share("compute_s"), share("wait_s"), late.slice(0, 2).join(", ") + (late.length > 2 ? " …" : "") || "nobody", share("exchange_s"),
        steps ? number(steps) : "–", lossText(last.loss), ...(has_heldout ? [lossText(last.heldout_loss)] : []),
        last.up ? rate(last.up) : "–", last.down ? rate(last.down) : "–",
      ],
    };
  });
  const heads = ["Peer", "Role", ">Round", ">Training", ">Waiting", "for", ">Exchange", ">Steps/s", ...(has_heldout ? [">Training loss", ">Held-out loss"] : [">Loss"]), ">Up", ">Down"];
  table("peers", heads, rows);
  const errors = names.filter((peer) => history.last[peer]?.error && !isGone(peer));
  at("errors").replaceChildren(...errors.map((peer) => h("li", {}, `${peer}: ${history.last[peer].error}`)));
  at("errors-box").hidden = !errors.length;
}

function describeRound(peer, row) {
  const which = row.first === row.last ? `round ${row.last}` : `rounds ${row.first} to ${row.last}`;
  const wait = row.wait_s ? `, waited ${duration(row.wait_s)}${row.late ? ` for ${row.late}` : ""}` : "";
  const again = row.attempts > 1 ? `, ${row.attempts} attempts` : "";
  return `${peer}, ${which} at ${full(row.unix_s)}: ${duration(row.took_s)}, trained ${duration(row.compute_s ?? 0)}${wait}, exchanged ${duration(row.exchange_s ?? 0)}${again}`;
}

function showRounds() {
  const { history } = state;
  timeline(at("timeline"), Object.fromEntries(present().map((peer) => [peer, history.rounds[peer]])), describeRound);
  const rows = present().flatMap((peer) => history.rounds[peer].slice(-10).map((row) => ({ peer, row })));
  rows.sort((a, b) => b.row.last - a.row.last || a.peer.localeCompare(b.peer));
  table("rounds", ["Round", "Peer", "At", ">Training", ">Waiting", "for", ">Exchange", ">Attempts"], rows.map(({ peer, row }) => ({
    cells: [
      row.first === row.last ? `${row.last}` : `${row.first} to ${row.last}`, peer, full(row.unix_s), duration(row.compute_s ?? 0),
      duration(row.wait_s ?? 0), row.late ?? "", duration(row.exchange_s ?? 0), `${row.attempts ?? 1}`,
    ],
  })));
}

// ---------------------------------------------------------------- charts, bytes, links

function showChips(peers) {
  if (at("chips").dataset.peers === peers.join()) return;
  at("chips").dataset.peers = peers.join();
  at("chips").replaceChildren(...peers.map((peer, style) => {
    const chip = h("button", { type: "button", "aria-pressed": state.chosen.has(peer) }, legendMark(style), peer);
    chip.addEventListener("click", () => {
      state.chosen[state.chosen.has(peer) ? "delete" : "add"](peer);
      chip.setAttribute("aria-pressed", state.chosen.has(peer));
      showCharts();
    });
    return chip;
  }));
}

function showCharts() {
  const series = state.history?.series;
  if (!series) return;
  const peers = Object.keys(series.peers).sort();
  showChips(peers);
  const lines = (figure) => peers.map((peer, style) => ({
    name: peer, values: series.peers[peer][figure], style: style % OWN_STYLES,
    faint: state.chosen.size > 0 && !state.chosen.has(peer), strong: state.chosen.has(peer),
  }));
  const times = series.unix_s;
  showLosses(times, lines("loss"), lines("heldout_loss").filter((line) => line.values));
  lineChart(at("memory"), { times, lines: lines("memory_bytes"), format: memory, from_zero: true, unit: 2 ** 20, label: "Memory of each daemon" });
  const among = state.chosen.size ? peers.filter((peer) => state.chosen.has(peer)) : peers;
  const phases = [["training", "compute_s", 0], ["waiting", "wait_s", 1], ["exchange", "exchange_s", 2]].map(([name, figure, style]) => ({
    name, style, values: times.map((_, i) => average(among.map((peer) => series.peers[peer][figure][i]))),
  }));
  // From the first round to the last: what comes after that are no rounds.
  const known = (v) => v !== null, part = [Math.max(0, phases[0].values.findIndex(known)), phases[0].values.findLastIndex(known) + 1];
  lineChart(at("share"), { times: times.slice(...part), lines: phases.map((p) => ({ ...p, values: filled(p.values.slice(...part)) })), format: duration, stacked: true, label: "Training, waiting and exchange per round, mean of the peers" });
  showBytes(series);
}

function showLosses(times, training, heldout) {
  const both = () => [...training.map((line) => ({ ...line, kind: "training" })), ...heldout.map((line) => ({ ...line, kind: "held-out", seldom: true }))];
  const lines = heldout.length ? both() : training;
  const label = `${heldout.length ? "Training and held-out loss" : "Loss"} that each trainer has reported`;
  lineChart(at("loss"), { times, lines, format: plain, label });
}

const average = (values) => {
  const known = values.filter((v) => v !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};

function filled(values) {
  let last = null;
  return values.map((v) => (last = v ?? last));
}

function showBytes(series) {
  const { history, status } = state;
  const totals = history.purposes.map((_, i) => Object.values(history.totals).reduce((sum, t) => sum + t.sent[i], 0));
  const lines = history.purposes.map((name, i) => {
    let sum = totals[i] - series.sent[i].reduce((a, b) => a + b, 0);
    return { name, style: i, values: series.sent[i].map((v) => (sum += v)) };
  });
  lineChart(at("bytes"), { times: series.unix_s, lines, format: size, stacked: true, label: "Bytes that all have sent so far, by purpose" });
  const sent = totals.reduce((a, b) => a + b, 0), per = history.all_reduce_bytes_per_parameter;
  const since = `since ${full(history.oldest_unix_s)}`;
  let text = `All have sent ${size(sent)} ${since}.`;
  if (per === null) text += " No trainer reports its steps (a method's rounds do; a bare session: session.report(steps=...)), so this cannot be compared with an all-reduce at every step.";
  else if (!status?.parameters) text += " How large the model is, is not recorded, so this cannot be compared with an all-reduce at every step.";
  else if (per) text += ` An all-reduce of float32 gradients at every step would have sent ${size(per * status.parameters)}, ${number((per * status.parameters) / Math.max(1, sent))} times as much.`;
  set("all-reduce", text);
  const rows = Object.entries(history.totals).map(([peer, t]) => ({ cells: [peer, ...t.sent.map(size), size(t.received.reduce((a, b) => a + b, 0))] }));
  table("byte-table", ["Peer", ...history.purposes.map((name) => `>${name}`), ">received"], rows, `sent ${since}, by purpose; and received`);
}

function showLinks() {
  const { history } = state;
  const sources = present().filter((peer) => history.links[peer]?.length);
  const names = [...new Set([...sources, ...sources.flatMap((peer) => history.links[peer].map((link) => link.peer))])].filter((peer) => present().includes(peer)).sort();
  if (!names.length) { table("links", ["Links"], [{ cells: ["nobody has told of its links yet"] }]); return; }
  const rates = sources.flatMap((peer) => history.links[peer].map((link) => link.out).filter(Boolean)).sort((a, b) => a - b);
  const usual = rates[Math.floor(rates.length / 2)];
  const rows = sources.map((from) => ({
    cells: [from, ...names.map((to) => {
      if (from === to) return "";
      const link = history.links[from].find((found) => found.peer === to);
      if (!link) return "–";
      const is_slow = link.out && link.out < usual / 2;
      const rest = [is_slow ? "slow" : "", link.rtt_s ? duration(link.rtt_s) : "", link.loss ? `${number(100 * link.loss, 2)} % loss` : link.loss === 0 ? "no loss" : ""];
      return h("span", {}, h("span", { className: is_slow ? "rate bad" : "rate" }, link.out ? rate(link.out) : "not measured"), h("span", { className: "rest" }, rest.filter(Boolean).join(", ")));
    })],
  }));
  table("links", ["from \\ to", ...names], rows);
}

// ---------------------------------------------------------------- events

function showHistoryList() {
  const own = state.status?.history ?? [];
  const known = state.notable ?? [];
  const seen = new Set(), items = [];
  for (const event of [...known, ...own].sort((a, b) => b.unix_s - a.unix_s)) {
    const key = event.text;
    if (!seen.has(key)) items.push(h("li", {}, h("time", { dateTime: new Date(event.unix_s * 1000).toISOString() }, full(event.unix_s)), ` ${event.kind}: ${event.text}`));
    seen.add(key);
  }
  for (const ban of state.status?.admission.banned ?? []) {
    items.push(h("li", {}, `banned ${ban.text}; evidence ${ban.evidence.slice(0, 16)}${ban.agreed ? "" : " (not in the view yet)"}`));
  }
  at("history").replaceChildren(...(items.length ? items.slice(0, 30) : [h("li", {}, "none")]));
}

function showKinds(kinds) {
  if (at("kinds").dataset.kinds === kinds.join()) return;
  at("kinds").dataset.kinds = kinds.join();
  at("kinds").replaceChildren(...kinds.map((kind) => {
    const box = h("input", { type: "checkbox", checked: state.kinds.has(kind), id: `kind-${kind}` });
    box.addEventListener("change", () => {
      state.kinds[box.checked ? "add" : "delete"](kind);
      state.limit = SHOWN_EVENTS;
      fetchEvents();
    });
    return h("label", { htmlFor: box.id }, box, ` ${kind}`);
  }));
}

function showEvents({ events, more, kinds }) {
  state.events = events;
  showKinds(kinds);
  const rows = [...events].reverse().map((event) => ({ cells: [full(event.unix_s), event.kind, event.text ?? JSON.stringify(event)] }));
  table("events", ["When", "Kind", "What"], rows);
  const which = state.kinds.size ? [...state.kinds].join(", ") : "all kinds but the lines of rounds";
  set("event-note", events.length ? `${events.length} events, the newest first: ${which}` : "no events of these kinds in this time");
  at("more").hidden = !more || state.limit >= 1000;
}

async function fetchEvents() {
  const query = new URLSearchParams({ limit: state.limit });
  for (const [id, name] of [["from", "since"], ["to", "until"]]) {
    if (at(id).value) query.set(name, new Date(at(id).value).getTime() / 1000);
  }
  if (state.kinds.size) query.set("kind", [...state.kinds].join());
  showEvents(await ask(`api/events?${query}`));
}

// ---------------------------------------------------------------- asking, again and again

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

async function fetchStatus() {
  const { status, recorded, now_unix_s } = await ask("api/status");
  Object.assign(state, { status, recorded, ahead_s: now_unix_s - Date.now() / 1000 });
  showStatus();
}

async function fetchHistory() {
  const span = Number(at("since").value), points = Math.min(400, Math.max(120, Math.floor(innerWidth / 4)));
  const end = state.recorded ? state.history?.newest_unix_s ?? 0 : daemonNow();
  // The series are most of the bytes, and change slowly.
  const wanted = !state.history?.series || Date.now() - state.series_ms > SERIES_EVERY_MS;
  const history = await ask(`api/history?since=${span && end ? Math.max(0, end - span) : 0}&points=${wanted ? points : 0}`);
  if (wanted) state.series_ms = Date.now();
  history.series ??= state.history?.series;
  state.history = history;
  state.notable = (await ask(`api/events?kind=${HISTORY_KINDS.join()}&limit=30`)).events;
  showGlance(); showPeers(); showRounds(); showCharts(); showLinks(); showHistoryList();
}

async function safely(work) {
  try {
    await work();
    set("link-state", state.recorded ? "recorded" : `live, ${clock(daemonNow())}`);
  } catch (error) {
    set("link-state", `no answer from the daemon: ${error.message}`);
  }
}

function every(work, period_ms) {
  const again = async () => {
    if (!document.hidden) await safely(work);
    setTimeout(again, state.recorded ? RECORDED_EVERY_MS : period_ms);
  };
  return again();
}

function restore() {
  const kept = (name, otherwise) => localStorage.getItem(`atoll-${name}`) ?? otherwise;
  const keep = (name, value) => localStorage.setItem(`atoll-${name}`, value);
  const theme = at("theme");
  const dress = () => { if (theme.value) document.documentElement.dataset.theme = theme.value; else delete document.documentElement.dataset.theme; };
  theme.value = kept("theme", "");
  dress();
  theme.addEventListener("change", () => { keep("theme", theme.value); dress(); });
  at("goal").value = kept("goal", "");
  at("goal-kind").value = kept("goal-kind", "round");
  for (const id of ["goal", "goal-kind"]) at(id).addEventListener("input", () => { keep(id, at(id).value); showGlance(); });
  at("since").addEventListener("change", () => { state.series_ms = 0; safely(fetchHistory); });
  for (const id of ["from", "to"]) at(id).addEventListener("change", () => { state.limit = SHOWN_EVENTS; safely(fetchEvents); });
  at("any-time").addEventListener("click", () => { at("from").value = at("to").value = ""; state.limit = SHOWN_EVENTS; safely(fetchEvents); });
  at("more").addEventListener("click", () => { state.limit = Math.min(1000, 3 * state.limit); safely(fetchEvents); });
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => state.history && (showRounds(), showCharts()), 150); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { safely(fetchStatus); safely(fetchHistory); } });
}

restore();
await every(fetchStatus, STATUS_EVERY_MS);
await every(fetchHistory, HISTORY_EVERY_MS);
await every(fetchEvents, HISTORY_EVERY_MS);
at("main").dataset.ready = "yes";
