"use strict";
// Asks for status.json again and again, and shows memory by holder, sessions and the queue.
const EVERY_MS = 2000;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const COLOURS = 6;

function amount(bytes) {
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < UNITS.length) {
    bytes /= 1024;
    unit += 1;
  }
  return (unit ? bytes.toFixed(1) : String(bytes)) + " " + UNITS[unit];
}

function duration(ms) {
  const seconds = ms / 1000;
  if (seconds < 10) return seconds.toFixed(1) + " s";
  return seconds < 600 ? Math.round(seconds) + " s" : Math.round(seconds / 60) + " min";
}

// Text only: names come from scripts, and are never taken for HTML.
function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function table(heads, rows) {
  const holder = make("div", undefined, "scroll");
  const made = make("table");
  const top = make("tr");
  heads.forEach(([text, kind]) => {
    const cell = make("th", text, kind);
    cell.scope = "col";
    top.append(cell);
  });
  const head = make("thead");
  head.append(top);
  const body = make("tbody");
  rows.forEach((row) => {
    const line = make("tr");
    row.forEach((text, i) => line.append(make("td", text, heads[i][1])));
    body.append(line);
  });
  made.append(head, body);
  holder.append(made);
  return holder;
}

function holders(daemon) {
  const found = daemon.sessions.map((s) => ({
    name: s.session + " " + s.client,
    bytes: s.segment_bytes - (s.segment_kinds.base || 0) + s.arena_bytes,
  }));
  (daemon.kept || []).filter((k) => k.base || !k.in_use).forEach((k) => {
    found.push({name: (k.base ? "base: " : "kept: ") + k.name, bytes: k.bytes});
  });
  return found.filter((h) => h.bytes > 0).sort((a, b) => b.bytes - a.bytes);
}

function memory(daemon) {
  const found = holders(daemon);
  const held = found.reduce((sum, h) => sum + h.bytes, 0);
  const whole = Math.max(daemon.memory_limit || 0, held, 1);
  const part = make("section");
  part.append(make("h3", "Memory by holder: " + amount(held) +
    " (limit of activations " + amount(daemon.memory_limit || 0) + ")"));
  const bar = make("div", undefined, "bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", found.map((h) => h.name + " " + amount(h.bytes)).join(", "));
  const legend = make("ul", undefined, "legend");
  found.forEach((h, i) => {
    const colour = "var(--c" + (i % COLOURS) + ")";
    const piece = make("span");
    piece.style.width = (100 * h.bytes) / whole + "%";
    piece.style.background = colour;
    piece.title = h.name + ": " + amount(h.bytes);
    bar.append(piece);
    const key = make("span", undefined, "key");
    key.style.background = colour;
    const item = make("li");
    item.append(key, h.name + ": " + amount(h.bytes));
    legend.append(item);
  });
  part.append(bar, legend);
  return part;
}

function sessions(daemon) {
  const part = make("section");
  part.append(make("h3", "Sessions"));
  const rows = daemon.sessions.map((s) => [
    String(s.session), s.client, String(s.pid), s.model || "", s.state,
    amount(s.segment_bytes), amount(s.arena_bytes), String(s.share),
    Math.round(100 * s.busy) + " %",
    s.steps_per_second.toFixed(1), duration(s.idle_ms),
  ]);
  const heads = [["No.", "n"], ["name"], ["pid", "n"], ["model"], ["state"], ["shared", "n"],
    ["activations", "n"], ["share", "n"], ["engine", "n"], ["steps/s", "n"], ["idle", "n"]];
  part.append(rows.length ? table(heads, rows) : make("p", "none"));
  const kept = (daemon.kept || []).map((k) => [
    k.name, String(k.pid), k.base ? "base of " + k.users : k.in_use ? "in use" : "left", amount(k.bytes),
    k.left_ms < 0 ? "" : duration(k.left_ms),
  ]);
  if (kept.length) {
    part.append(make("h3", "Kept sessions and bases"));
    part.append(table([["name"], ["pid", "n"], ["state"], ["memory", "n"], ["left", "n"]], kept));
  }
  return part;
}

function queue(daemon) {
  const part = make("section");
  part.append(make("h3", "Queue"));
  const running = daemon.sessions.filter((s) => s.state === "running");
  const waiting = daemon.sessions.filter((s) => s.waiting > 0);
  const name = (s) => s.session + " " + s.client;
  part.append(make("p", "runs: " + (running.map(name).join(", ") || "nothing")));
  part.append(make("p", "waits: " +
    (waiting.map((s) => name(s) + " (" + s.waiting + ")").join(", ") || "nothing")));
  const wanting = daemon.sessions.filter((s) => s.wanted_bytes > 0);
  if (wanting.length) {
    part.append(make("p", "waits for memory: " + wanting.map((s) => name(s) + " (" +
      amount(s.wanted_bytes) + ", " + duration(s.wanted_ms) + ")").join(", "), "warn"));
  }
  const rows = (daemon.verbs || []).filter((v) => v.n > 0).map((v) => [
    v.v, String(v.n), (v.waited_us / v.n / 1000).toFixed(2) + " ms",
    (v.ran_us / v.n / 1000).toFixed(2) + " ms",
  ]);
  const heads = [["request"], ["done", "n"], ["waited, mean", "n"], ["ran, mean", "n"]];
  if (rows.length) part.append(table(heads, rows));
  return part;
}

function daemonPart(daemon) {
  const part = make("article");
  if (!daemon.sessions) {
    part.append(make("h2", daemon.name), make("p", "the daemon does not answer", "warn"));
    return part;
  }
  part.append(make("h2", daemon.device + (daemon.name === "main" ? "" : " (" + daemon.name + ")")));
  part.append(make("p", "gradd " + daemon.version + ", pid " + daemon.pid + ", up " +
    duration(daemon.uptime_ms) + ", " + daemon.threads + " threads, " + daemon.workers_lost +
    " workers replaced"));
  if (daemon.drained) part.append(make("p", "drained: " + daemon.drained, "warn"));
  part.append(memory(daemon), sessions(daemon), queue(daemon));
  return part;
}

async function look() {
  const news = document.getElementById("news");
  try {
    const reply = await fetch("status.json", {cache: "no-store"});
    if (!reply.ok) throw new Error("status " + reply.status);
    const status = await reply.json();
    const place = document.getElementById("daemons");
    place.replaceChildren(...status.daemons.map(daemonPart));
    const n = status.daemons.reduce((sum, d) => sum + (d.sessions || []).length, 0);
    const text = status.daemons.length
      ? status.daemons.length + (status.daemons.length === 1 ? " daemon, " : " daemons, ") + n +
        (n === 1 ? " session" : " sessions")
      : "no daemon runs";
    if (news.textContent !== text) news.textContent = text;
    news.className = "";
  } catch (error) {
    news.textContent = "gradd web does not answer (" + error.message + ")";
    news.className = "warn";
  }
  setTimeout(look, EVERY_MS);
}

look();
