"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const digits = (value, count) => Number(value.toPrecision(count)).toLocaleString("en", { maximumSignificantDigits: count });

function seconds(value) {
  if (value === 0) return "0";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
    if (Math.abs(value) >= size || unit === "µs") return `${digits(value / size, 3)} ${unit}`;
}

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

// -- timelines: what an event is stands in its path, and beside it -------------------------------------------------------------

const WIDE = 1e6;

function eventsOf(lane, about) {
  const found = [];
  for (const path of all("path", lane)) {
    const kind = path.getAttribute("class");
    const names = path.dataset.about.split(" ");
    let pen = 0, place = 0;
    for (const [, moved, wide] of path.getAttribute("d").matchAll(/m(-?\d+) 0h(\d+)/g)) {
      pen += Number(moved);
      const [name, microbatch, count] = names[place++].split(".").map(Number);
      found.push({ begin: pen, end: pen + Number(wide), kind, name: about.names[name], microbatch, count: count || 1 });
    }
  }
  return found.sort((one, other) => one.begin - other.begin);
}

function timeline(root) {
  const about = data.timeline, pane = find(".pane", root), wide = find(".wide", root), svg = find("svg", root);
  const readout = document.getElementById(`${root.id}-readout`), cursor = find(".cursor", root);
  const labels = all(".lanes li", root).map((label) => label.textContent);
  const lanes = all("[data-lane]", svg).map((lane) => eventsOf(lane, about));
  let zoom = 1, lane = 0, place = -1;

  function show(event, number) {
    const box = svg.getBoundingClientRect(), each = box.height / lanes.length;
    cursor.className = "cursor on span";
    cursor.style.left = `${(event.begin / WIDE) * 100}%`;
    cursor.style.width = `${Math.max(0.05, ((event.end - event.begin) / WIDE) * 100)}%`;
    cursor.style.top = `${box.top - wide.getBoundingClientRect().top + number * each}px`;
    cursor.style.height = `${each}px`;
    cursor.style.bottom = "auto";
    const time = about.seconds / WIDE;
    const words = [`${labels[number]}: ${about.words[event.kind] || event.kind}`];
    if (event.name) words.push(event.name);
    if (event.microbatch) words.push(`microbatch ${event.microbatch}`);
    if (event.count > 1) words.push(`and ${event.count - 1} more beside it`);
    words.push(`${seconds((event.end - event.begin) * time)}, from ${seconds(event.begin * time)} on`);
    readout.textContent = words.join("; ");
  }

  function at(number, time) {
    const own = lanes[number] || [];
    return own.findIndex((event) => event.begin <= time && time <= event.end);
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const number = Math.floor(((event.clientY - box.top) / box.height) * lanes.length);
    const found = at(number, ((event.clientX - box.left) / box.width) * WIDE);
    if (found < 0) return;
    [lane, place] = [number, found];
    show(lanes[lane][place], lane);
  }

  function scale(next, middle) {
    const centre = middle ?? (pane.scrollLeft + pane.clientWidth / 2) / wide.clientWidth;
    zoom = Math.min(256, Math.max(1, next));
    wide.style.width = `${zoom * 100}%`;
    pane.scrollLeft = centre * wide.clientWidth - pane.clientWidth / 2;
    const power = 10 ** Math.floor(Math.log10(about.seconds / (10 * zoom)));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => about.seconds / one <= 10 * zoom);
    find(".ticks", root).replaceChildren(...Array.from({ length: Math.ceil(about.seconds / step) }, (_, number) => {
      const tick = document.createElement("span");
      tick.style.left = `${(100 * number * step) / about.seconds}%`;
      tick.textContent = seconds(number * step);
      return tick;
    }));
  }

  function into(event) {
    const left = (event.begin / WIDE) * wide.clientWidth;
    if (left < pane.scrollLeft || left > pane.scrollLeft + pane.clientWidth - 40) pane.scrollLeft = left - pane.clientWidth / 3;
  }

  function key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1 }, moves = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in steps) place += steps[event.key];
    else if (event.key in moves) {
      const time = lanes[lane][place]?.begin ?? 0;
      lane = Math.min(lanes.length - 1, Math.max(0, lane + moves[event.key]));
      place = Math.max(0, lanes[lane].findIndex((other) => other.end > time));
    } else if (event.key === "Home") place = 0;
    else if (event.key === "End") place = lanes[lane].length - 1;
    else if (event.key === "+" || event.key === "=") return scale(zoom * 2, (lanes[lane][place]?.begin ?? WIDE / 2) / WIDE);
    else if (event.key === "-") return scale(zoom / 2);
    else return;
    event.preventDefault();
    place = Math.min(lanes[lane].length - 1, Math.max(0, place));
    if (lanes[lane][place]) {
      show(lanes[lane][place], lane);
      into(lanes[lane][place]);
    }
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("click", point);
  pane.addEventListener("keydown", key);
  for (const button of all(`[data-of="${root.id}"]`))
    button.addEventListener("click", () => scale({ in: zoom * 2, out: zoom / 2, all: 1 }[button.dataset.zoom]));
}

// -- charts: values by time or by step ------------------------------------------------------------------------------------------

function chart(root, times, words) {
  const pane = find(".pane", root), wide = find(".wide", root), cursor = find(".cursor", root);
  const readout = document.getElementById(`${root.id}-readout`);
  const first = times[0], last = times[times.length - 1];
  let place = -1;

  function show() {
    cursor.className = "cursor on";
    cursor.style.left = `${last > first ? (100 * (times[place] - first)) / (last - first) : 0}%`;
    readout.textContent = words(place);
  }

  function point(event) {
    const box = wide.getBoundingClientRect();
    const time = first + ((event.clientX - box.left) / box.width) * (last - first);
    place = times.reduce((best, other, index) => (Math.abs(other - time) < Math.abs(times[best] - time) ? index : best), 0);
    show();
  }

  wide.addEventListener("pointermove", point);
  wide.addEventListener("click", point);
  pane.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -times.length, End: times.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    place = Math.min(times.length - 1, Math.max(0, place + steps[event.key]));
    show();
  });
}

function memoryWords(about, place) {
  const parts = about.names.map((name, index) => [name, about.bytes[index][place]]).filter(([, size]) => size);
  const whole = parts.reduce((sum, [, size]) => sum + size, 0);
  const listed = parts.sort((one, other) => other[1] - one[1]).map(([name, size]) => `${name} ${bytes(size)}`);
  return `${seconds(about.times[place])}, ${about.moments[place]}: ${bytes(whole)} = ${listed.join(" + ")}`;
}

const FORMATS = { bytes, seconds, plain: (value) => digits(value, 5) };

function lineWords(about, place) {
  const values = about.lines.filter((line) => line.values[place] !== null && line.values[place] !== undefined);
  return `${about.by} ${about.at[place].toLocaleString("en")}: ` +
    values.map((line) => `${line.name} ${FORMATS[about.format](line.values[place])}`).join(", ");
}

// -- ranks on their nodes -------------------------------------------------------------------------------------------------------

function mesh(about) {
  const svg = document.getElementById("mesh-map"), readout = document.getElementById("mesh-readout");
  const number = document.getElementById("rank"), space = "http://www.w3.org/2000/svg";
  const nodes = Math.ceil(about.world / about.node), columns = Math.ceil(Math.sqrt(about.node * (about.node > 8 ? 1 : 2)));
  const rows = Math.ceil(about.node / columns), gap = 3;
  const size = nodes <= 4 ? 26 : nodes <= 32 ? 16 : nodes <= 128 ? 11 : nodes <= 512 ? 8 : 5;
  const wide = columns * size + gap * 2, high = rows * size + gap * 2;
  let across = 1, axis = 0, rank = 0;

  function corner(one) {
    const node = Math.floor(one / about.node), inside = one % about.node;
    return [(node % across) * (wide + gap) + gap + (inside % columns) * size,
            Math.floor(node / across) * (high + gap) + gap + Math.floor(inside / columns) * size];
  }

  const square = (one) => { const [x, y] = corner(one); return `M${x} ${y}h${size - 2}v${size - 2}h-${size - 2}z`; };

  function path(kind, shape) {
    const made = document.createElementNS(space, "path");
    made.setAttribute("class", kind);
    made.setAttribute("d", shape);
    svg.append(made);
    return made;
  }

  let chosen, one;

  function lay() {
    const room = svg.parentElement.clientWidth - 20;
    across = Math.max(1, Math.min(nodes, Math.floor(room / (wide + gap))));
    const whole = across * (wide + gap), deep = Math.ceil(nodes / across) * (high + gap);
    svg.setAttribute("viewBox", `0 0 ${whole} ${deep}`);
    svg.style.width = `${whole}px`;
    for (const old of all("path", svg)) old.remove();
    const frames = Array.from({ length: nodes }, (_, node) => {
      const x = (node % across) * (wide + gap), y = Math.floor(node / across) * (high + gap);
      return `M${x + .5} ${y + .5}h${wide - 1}v${high - 1}h-${wide - 1}z`;
    });
    path("node", frames.join(""));
    path("ranks", Array.from({ length: about.world }, (_, each) => square(each)).join(""));
    chosen = path("chosen", "");
    one = path("one", "");
  }

  const firstOf = (group, member) => member - (Math.floor(member / group.distance) % group.size) * group.distance;
  const members = (group, member) => Array.from({ length: group.size }, (_, place) => firstOf(group, member) + place * group.distance);

  function show() {
    const group = about.groups[axis], own = members(group, rank);
    chosen.setAttribute("d", own.map(square).join(""));
    one.setAttribute("d", square(rank));
    number.value = rank;
    const over = new Set(own.map((member) => Math.floor(member / about.node))).size;
    const shown = own.length > 12 ? `${own.slice(0, 8).join(", ")}, ... ${own[own.length - 1]}` : own.join(", ");
    readout.textContent = `${group.axis}, ${group.words}: the group of rank ${rank} is ${shown} (${own.length} ranks ` +
      `${over > 1 ? `on ${over} nodes` : "of one node"})${group.traffic ? `; a rank sends ${group.traffic} a step` : ""}`;
  }

  function step(by) {
    // The first ranks of all groups, in order; the next one after that of this group.
    const group = about.groups[axis], block = group.distance * group.size, own = firstOf(group, rank);
    const place = Math.floor(own / block) * group.distance + (own % block), count = about.world / group.size;
    const next = (place + by + count) % count;
    rank = Math.floor(next / group.distance) * block + (next % group.distance);
    show();
  }

  all('input[name="axis"]').forEach((input) => input.addEventListener("change", () => { axis = Number(input.value); show(); }));
  all("[data-group]").forEach((button) => button.addEventListener("click", () => step(Number(button.dataset.group))));
  number.addEventListener("input", () => {
    const value = Number(number.value);
    if (number.value !== "" && Number.isInteger(value) && value >= 0 && value < about.world) { rank = value; show(); }
  });
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const node = Math.floor(y / (high + gap)) * across + Math.floor(x / (wide + gap));
    const inside = Math.floor(((y % (high + gap)) - gap) / size) * columns + Math.floor(((x % (wide + gap)) - gap) / size);
    const found = node * about.node + inside;
    if (inside >= 0 && inside < about.node && found < about.world) { rank = found; show(); }
  });
  lay();
  show();
  addEventListener("resize", () => { lay(); show(); });
}

// -- tables ---------------------------------------------------------------------------------------------------------------------

const keyOf = (row, column) => {
  const cell = row.children[column], key = cell.dataset.key ?? cell.textContent.trim();
  return key !== "" && !Number.isNaN(Number(key)) ? Number(key) : key;
};

function sort(table, head, column) {
  const down = head.getAttribute("aria-sort") !== "descending" && head.classList.contains("n") ||
    head.getAttribute("aria-sort") === "ascending";
  for (const other of all("th[aria-sort]", table)) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = all("tbody tr", table).map((row) => [keyOf(row, column), row]);
  rows.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0) * (down ? -1 : 1));
  find("tbody", table).append(...rows.map(([, row]) => row));
}

function candidates() {
  const table = document.getElementById("candidate-table"), plot = document.getElementById("candidate-plot");
  const readout = document.getElementById("candidate-readout"), text = document.getElementById("candidate-text");
  const rows = new Map(all("tbody tr", table).map((row) => [row.dataset.row, row]));
  const points = new Map(all("circle", plot).map((point) => [point.dataset.row, point]));

  function choose(number, jump) {
    for (const one of [...rows.values(), ...points.values()]) one.classList.remove("on");
    const row = rows.get(number);
    row.classList.add("on");
    points.get(number).classList.add("on");
    const cells = [...row.children].map((cell) => cell.textContent.trim());
    readout.textContent = `${row.firstElementChild.firstChild.textContent}: ${cells[1]} tokens/s, a step of ${cells[2]}, ` +
      `peak ${cells[3]}${cells[6] ? `; ${cells[6]}` : ""}; ${cells[7]}`;
    if (jump) row.scrollIntoView({ block: "nearest" });
  }

  function filter() {
    const wanted = all("[data-only]").filter((box) => box.checked).map((box) => box.dataset.only);
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const [number, row] of rows) {
      const is = row.dataset.is.split(" "), content = row.textContent.toLowerCase();
      const stays = wanted.every((one) => is.includes(one)) && words.every((word) => content.includes(word));
      row.hidden = !stays;
      points.get(number).classList.toggle("hidden", !stays);
      left += stays;
    }
    document.getElementById("candidate-count").textContent = `${left} of ${rows.size}`;
  }

  for (const [number, point] of points) {
    point.addEventListener("pointerenter", () => choose(number, false));
    point.addEventListener("click", () => choose(number, true));
  }
  for (const [number, row] of rows) {
    row.addEventListener("pointerenter", () => choose(number, false));
    row.addEventListener("focusin", () => choose(number, false));
  }
  text.addEventListener("input", filter);
  all("[data-only]").forEach((box) => box.addEventListener("change", filter));
  filter();
}

// -- the page -------------------------------------------------------------------------------------------------------------------

all(".timeline").forEach(timeline);
if (data.memory) chart(document.getElementById("memory-chart"), data.memory.times, (place) => memoryWords(data.memory, place));
for (const [key, about] of Object.entries(data.charts || {}))
  chart(document.getElementById(key), about.at, (place) => lineWords(about, place));
if (data.mesh) mesh(data.mesh);
if (data.candidates) candidates();
all("th[aria-sort]").forEach((head) => find("button", head).addEventListener("click", () =>
  sort(head.closest("table"), head, [...head.parentElement.children].indexOf(head))));
all("[data-unfold], [data-fold]").forEach((button) => button.addEventListener("click", () => {
  const open = "unfold" in button.dataset;
  all("details", document.getElementById(button.dataset.unfold || button.dataset.fold)).forEach((one) => { one.open = open; });
}));
addEventListener("beforeprint", () => all("details").forEach((one) => { one.open = true; }));
