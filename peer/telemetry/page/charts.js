// Draw lines, areas and the timeline as SVG, for eyes, keyboards and screen readers.
// Texts of peers are only ever set as text, never as markup.

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 200, LEFT = 62, RIGHT = 8, TOP = 8, BOTTOM = 22;

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function clock(unix_s, with_seconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (with_seconds) options.second = "2-digit";
  return new Date(unix_s * 1000).toLocaleTimeString([], options);
}

// Ticks at 1, 2 or 5 times a power of ten.
function ticks(low, high, wanted = 4) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
  return found;
}

function timeTicks(low, high, wanted) {
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 604800];
  const step = steps.find((s) => (high - low) / s <= wanted) ?? steps.at(-1);
  const shift = new Date(high * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((low - shift) / step) * step + shift; at <= high; at += step) found.push(at);
  return { at: found, text: (t) => timeText(t, step) };
}

function timeText(unix_s, step) {
  if (step >= 86400) return new Date(unix_s * 1000).toLocaleDateString([], { month: "short", day: "numeric" });
  return clock(unix_s, step < 60);
}

function frame(box, label, height) {
  const width = Math.max(240, box.clientWidth);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  return { picture, width };
}

function axes(picture, width, height, x, y, times, values, format) {
  for (const value of values) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const moment of times.at) {
    const at = x(moment), anchor = at > width - 30 ? "end" : at < LEFT + 20 ? "start" : "middle";
    picture.append(svg("text", { x: at, y: height - 5, "text-anchor": anchor }, times.text(moment)));
  }
}

// lines: [{name, values, style, faint, strong, kind, seldom}] over times (unix_s), values may be null.
// With stacked, each line lies on the one before, and is filled. A seldom line is dashed and joins the points
// that there are, which have dots; then a legend says which kind of line is which.
export function lineChart(box, { times, lines, format, stacked = false, from_zero = false, unit = 1, label }) {
  const shown = lines.filter((line) => line.values.some((v) => v !== null));
  if (!times.length || !shown.length) {
    box.replaceChildren(paragraph("Nothing has been reported yet."));
    return;
  }
  const tops = stacked ? stack(shown) : shown.map((line) => line.values);
  const known = tops.flat().filter((v) => v !== null);
  let low = stacked || from_zero ? 0 : known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= stacked || from_zero ? 0 : Math.abs(low) * 0.1 || 1; }
  const last = said(shown.slice(0, 24), (line) => `${line.name} ${format(line.values.findLast((v) => v !== null))}`, ", ");
  const { picture, width } = frame(box, `${label}. Last: ${last}`, HEIGHT);
  const first = times[0], end = times.at(-1) > first ? times.at(-1) : first + 1;
  const x = (t) => LEFT + ((t - first) / (end - first)) * (width - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((v - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  axes(picture, width, HEIGHT, x, y, timeTicks(first, end, Math.floor(width / 90)), ticks(low / unit, high / unit).map((tick) => tick * unit), format);
  tops.forEach((top, i) => {
    const line = shown[i];
    if (stacked) picture.append(svg("path", { class: `f${line.style % 4}`, d: area(times, tops[i - 1], top, x, y) }));
    else picture.append(svg("path", {
      class: `line c${line.style % 8} d${Math.floor(line.style / 8) % 3}${line.seldom ? " seldom" : ""}${line.faint ? " faint" : ""}${line.strong ? " strong" : ""}`,
      d: path(times, top, x, y, line.seldom),
    }));
    if (line.seldom) picture.append(svg("path", { class: `dots c${line.style % 8}${line.faint ? " faint" : ""}`, d: dots(times, top, x, y) }));
  });
  const reading = box.querySelector(".reading") ?? paragraph("", "reading");
  const texts = (i) => said(shown.filter((line) => !line.faint), (line) => readAt(line, times, i, format), " · ");
  const group = withCursor(picture, times, x, reading, texts, label);
  const had = box.contains(document.activeElement);
  const marks = stacked ? areaMarks(shown) : shown.some((line) => line.seldom) ? kindMarks(shown) : [];
  box.replaceChildren(...(marks.length ? [legend(marks)] : []), group, reading);
  if (had) group.focus();
}

// What the lines say, those of one kind together.
function said(lines, text, between) {
  const kinds = [...new Set(lines.map((line) => line.kind))].map((kind) => {
    const found = lines.filter((line) => line.kind === kind).map(text).filter(Boolean).join(between);
    return kind && found ? `${kind}: ${found}` : found;
  });
  return kinds.filter(Boolean).join("; ");
}

// What a line says at a moment; a seldom one what it said last, and when.
function readAt(line, times, i, format) {
  const at = line.seldom ? line.values.slice(0, i + 1).findLastIndex((v) => v !== null) : i;
  const value = line.values[at] ?? null;
  return value === null ? "" : `${line.name} ${format(value)}${at === i ? "" : ` at ${clock(times[at])}`}`;
}

const areaMarks = (lines) => [...lines].reverse().map(({ name, style }) => [name, svg("path", { class: `f${style % 4}`, d: "M0 0h18v12h-18z" })]);

function kindMarks(lines) {
  const seldom = new Map(lines.map((line) => [line.kind, line.seldom]));
  return [...seldom].map(([kind, is_seldom]) => is_seldom
    ? [kind, svg("path", { class: "line kind seldom d0", d: "M0 6h18" }), svg("path", { class: "dots kind", d: "M9 6h.01" })]
    : [kind, svg("path", { class: "line kind", d: "M0 6h18" })]);
}

function legend(marks) {
  const made = paragraph("", "note legend");
  for (const [name, ...drawn] of marks) {
    const mark = svg("svg", { class: "mark", viewBox: "0 0 18 12", "aria-hidden": "true" }, ...drawn);
    const item = document.createElement("span");
    item.className = "item";
    item.append(mark, ` ${name}`);
    made.append(item);
  }
  return made;
}

function stack(lines) {
  const sums = lines[0].values.map(() => 0);
  return lines.map((line) => line.values.map((v, i) => (sums[i] += v ?? 0)));
}

function path(times, values, x, y, joined) {
  let text = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) { if (!joined && !lonely(values, i)) pen = "M"; return; }
    text += `${pen}${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return /L/.test(text) ? text : `${text}h1.5`;
}

const dots = (times, values, x, y) =>
  values.map((value, i) => (value === null ? "" : `M${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}h.01`)).join("");

// A gap of a few points is drawn over: rounds may be longer than a point is wide.
function lonely(values, i) {
  for (let k = 1; k <= 6; k++) if (values[i + k] !== null && values[i + k] !== undefined) return true;
  return false;
}

function area(times, below, above, x, y) {
  const upper = above.map((v, i) => `${x(times[i]).toFixed(1)} ${y(v).toFixed(1)}`);
  const lower = above.map((_, i) => `${x(times[i]).toFixed(1)} ${y(below ? below[i] : 0).toFixed(1)}`).reverse();
  return `M${upper.join("L")}L${lower.join("L")}Z`;
}

// The pointer, or the arrow keys, read the values of one moment.
function withCursor(picture, times, x, reading, texts, label) {
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(cursor);
  const group = document.createElement("div");
  group.className = "chart-box";
  group.tabIndex = 0;
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", `${label}: arrow keys read the values`);
  reading.setAttribute("role", "status");
  group.append(picture);
  let at = times.length - 1;
  const read = (i) => {
    at = Math.max(0, Math.min(times.length - 1, i));
    cursor.setAttribute("x1", x(times[at]));
    cursor.setAttribute("x2", x(times[at]));
    cursor.setAttribute("visibility", "visible");
    reading.textContent = `${clock(times[at])}  ${texts(at) || "nothing"}`;
  };
  group.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: times.length - 1 };
    if (event.key in moves) { event.preventDefault(); read(moves[event.key]); }
  });
  picture.addEventListener("pointermove", (event) => {
    const bounds = picture.getBoundingClientRect();
    const scale = picture.viewBox.baseVal.width / bounds.width;
    const where = (event.clientX - bounds.left) * scale;
    read(times.reduce((best, t, i) => (Math.abs(x(t) - where) < Math.abs(x(times[best]) - where) ? i : best), 0));
  });
  return group;
}

export function paragraph(text, name = "note") {
  const made = document.createElement("p");
  made.className = name;
  made.textContent = text;
  return made;
}

// One lane for each peer; each round is training, then waiting (thinner), and the exchange at its end.
export function timeline(box, rounds, describe) {
  const peers = Object.keys(rounds).filter((peer) => rounds[peer].length);
  if (!peers.length) {
    box.replaceChildren(paragraph("No round has been recorded yet."));
    return;
  }
  const all = peers.flatMap((peer) => rounds[peer]);
  const end = Math.max(...all.map((row) => row.unix_s));
  const longest = Math.max(0.001, ...all.map((row) => row.took_s));
  const width = Math.max(240, box.clientWidth);
  const usual = all.map((row) => row.took_s).sort((a, b) => a - b)[Math.floor(all.length / 2)];
  const span = Math.max(Math.min(longest, 4 * usual), Math.min(usual * Math.max(6, Math.floor(width / 60)), end - Math.min(...all.map((r) => r.unix_s - r.took_s))));
  const lane = peers.length > 8 ? 18 : 26, height = TOP + lane * peers.length + BOTTOM, start = end - span;
  const { picture } = frame(box, `The last ${Math.round(span)} seconds: ${peers.length} peers; the table below has the same`, height);
  const x = (t) => LEFT + 12 + (Math.max(0, t - start) / span) * (width - LEFT - 12 - RIGHT);
  const times = timeTicks(start, end, Math.floor(width / 90));
  axes(picture, width, height, x, () => 0, times, [], String);
  for (const moment of times.at) picture.append(svg("line", { class: "grid", x1: x(moment), x2: x(moment), y1: TOP, y2: height - BOTTOM }));
  peers.forEach((peer, i) => {
    const top = TOP + i * lane;
    picture.append(svg("text", { x: LEFT + 4, y: top + lane / 2 + 4, "text-anchor": "end" }, peer));
    for (const row of rounds[peer]) drawRound(picture, row, top, lane, x, start, () => describe(peer, row));
  });
  box.replaceChildren(picture);
}

function drawRound(picture, row, top, lane, x, start, describe) {
  if (row.unix_s < start) return;
  const begun = row.unix_s - row.took_s, exchange = row.exchange_s ?? 0;
  const trained = begun + (row.compute_s ?? 0);
  const parts = [
    ["compute", begun, trained, lane - 6],
    ["wait", trained, trained + (row.wait_s ?? 0), (lane - 6) / 2],
    ["exchange", row.unix_s - exchange, row.unix_s, lane - 6],
  ];
  const group = svg("g", {}, svg("title", {}, describe()));
  for (const [name, from, to, tall] of parts) {
    const wide = x(to) - x(from) - (name === "exchange" ? 1 : 0);
    if (to > start && wide > 0.2) group.append(svg("rect", { class: name, x: x(from), y: top + (lane - tall) / 2, width: wide, height: tall }));
  }
  picture.append(group);
}

export function legendMark(style) {
  return svg("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" }, svg("path", { class: `line strong c${style % 8} d${Math.floor(style / 8) % 3}`, d: "M0 4h26" }));
}
