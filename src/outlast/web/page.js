"use strict";
// The axis of time, zoomed by buttons, keys, mouse and fingers; the address has the shown seconds.
const WIDTH = 1000; // of the view of shapes
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const served = document.body.dataset.run; // in a file: nowhere
const main = document.querySelector("main");
const figures = () => [...main.querySelectorAll("svg.figure[data-wall]")];
const wall = () => Math.max(0, ...figures().map((figure) => Number(figure.dataset.wall)));
const fragment = () => new URLSearchParams(location.hash.slice(1).replace(/^(?=incident-)/, "at="));
let shown = null; // begin and end in seconds; null: the whole run
let waiting = 0;
function label(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length || seconds === length) return `${+(seconds / length).toFixed(2)} ${unit}`;
  }
  return seconds ? `${+seconds.toPrecision(6)} s` : "0";
}
function ticks(begin, end, height) {
  const length = end - begin;
  let step = STEPS.find((one) => length / one <= 5) ?? 86400 * Math.ceil(length / 432000);
  if (length < 3) step = 10 ** Math.floor(Math.log10(length / 2));
  let text = "";
  for (let at = Math.ceil(begin / step); at * step <= end; at++) {
    const share = (at * step - begin) / length;
    const side = share > 0.95 ? " end" : share ? " middle" : "";
    text += `<svg class="at" x="${100 * share}%"><line class="tick" y2="${height}"/>` +
      `<text y="${height + 13}" class="label${side}">${label(at * step)}</text></svg>`;
  }
  return text;
}
function draw() {
  for (const figure of figures()) {
    const from = Number(figure.dataset.from), to = Number(figure.dataset.to);
    const [begin, end] = shown ?? [from, to];
    const shapes = figure.querySelector(".shapes"), group = figure.querySelector(".ticks");
    const place = (seconds) => WIDTH * (seconds - from) / (to - from);
    const height = group.dataset.height;
    shapes.setAttribute("viewBox", `${place(begin)} 0 ${place(end) - place(begin)} ${height}`);
    if (shown) group.innerHTML = ticks(begin, end, Number(height));
    for (const mark of figure.querySelectorAll(".at[data-at]")) {
      const share = (mark.dataset.at - begin) / (end - begin);
      mark.setAttribute("x", `${100 * share}%`);
      mark.setAttribute("display", share < 0 || share > 1 ? "none" : "inline");
    }
  }
  document.getElementById("shown").textContent =
    shown ? `${label(+shown[0].toFixed(3))} to ${label(+shown[1].toFixed(3))}` : "";
}
async function detail() {
  const [begin, end] = shown ?? [0, wall()];
  const answer = await fetch(`${served}/window?from=${begin}&to=${end}`).catch(() => null);
  if (!answer?.ok || `${shown ?? [0, wall()]}` !== `${[begin, end]}`) return;
  for (const [key, html] of Object.entries(await answer.json())) replace(key, html);
  draw();
}
function show(begin, end, isTyped = false) {
  const all = wall(), length = Math.min(all, Math.max(end - begin, all / 1e5, 1e-3));
  const first = Math.min(Math.max(0, (begin + end - length) / 2), all - length);
  shown = length > 0.999 * all ? null : [first, first + length];
  const place = fragment();
  place.delete("t");
  if (shown) place.set("t", shown.map((seconds) => +seconds.toFixed(3)).join("-"));
  if (!isTyped) history.replaceState(null, "", `#${place}`.replace("at=incident", shown ? "at=incident" : "incident"));
  draw();
  clearTimeout(waiting);
  if (served) waiting = setTimeout(detail, 150);
}
const span = () => shown ?? [0, wall()];
function zoom(factor, at = (span()[0] + span()[1]) / 2) {
  const [begin, end] = span();
  show(at - (at - begin) * factor, at + (end - at) * factor);
}
function pan(share) {
  const [begin, end] = span(), by = share * (end - begin);
  if (shown) show(Math.max(0, begin + by), Math.max(0, begin + by) + end - begin);
}
const acts = { in: () => zoom(0.5), out: () => zoom(2), back: () => pan(-0.25), on: () => pan(0.25),
  all: () => show(0, wall()) };
const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "back", ArrowRight: "on", 0: "all" };
document.getElementById("zoom").hidden = false;
main.addEventListener("click", (event) => acts[event.target.closest("[data-zoom]")?.dataset.zoom]?.());
main.addEventListener("keydown", (event) => {
  if (!event.target.closest("#zoom, #timeline, #curves") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in keys) { event.preventDefault(); acts[keys[event.key]](); }
});
const under = (event) => event.target.closest?.("svg.figure[data-wall]");
function seconds(figure, x) { // at a place of the screen
  const plot = figure.getBoundingClientRect(), [begin, end] = span();
  return begin + (end - begin) * (x - plot.left) / plot.width;
}
main.addEventListener("wheel", (event) => {
  const figure = under(event);
  if (!figure) return;
  if (event.ctrlKey || event.metaKey) zoom(2 ** (event.deltaY / 100), seconds(figure, event.clientX));
  else if (shown && Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / figure.clientWidth);
  else return;
  event.preventDefault();
}, { passive: false });
main.addEventListener("dblclick", (event) => {
  const figure = under(event);
  if (figure) zoom(event.shiftKey ? 2 : 0.5, seconds(figure, event.clientX));
});
const fingers = new Map();
main.addEventListener("pointerdown", (event) => {
  if (under(event)) fingers.set(event.pointerId, event.clientX);
});
addEventListener("pointermove", (event) => {
  const before = fingers.get(event.pointerId), figure = figures()[0];
  if (before === undefined || !figure) return;
  const others = [...fingers].filter(([id]) => id !== event.pointerId);
  const width = figure.getBoundingClientRect().width;
  if (others.length) {
    const fixed = others[0][1], apart = Math.abs(event.clientX - fixed);
    if (apart > 8) zoom(Math.abs(before - fixed) / apart, seconds(figure, fixed));
  } else pan((before - event.clientX) / width);
  fingers.set(event.pointerId, event.clientX);
});
for (const name of ["pointerup", "pointercancel"]) {
  addEventListener(name, (event) => fingers.delete(event.pointerId));
}
main.addEventListener("dragstart", (event) => { if (under(event)) event.preventDefault(); });
// The address: `#incident-3`, `#t=120-480`, or both as `#at=incident-3&t=120-480`.
function typed() {
  const place = fragment(), [begin, end] = (place.get("t") ?? "").split("-").map(Number);
  if (begin >= 0 && end > begin) show(begin, end, true);
  const at = document.getElementById(place.get("at"));
  if (at instanceof HTMLDetailsElement) {
    at.open = true;
    if (place.has("t")) at.scrollIntoView();
  }
  if (shown && !place.has("t")) show(...shown);
}
addEventListener("hashchange", typed);
typed();
async function predict() { // takes as long as reading the run again: after the first screen
  const answer = await fetch(`${served}/predicted`).catch(() => null);
  if (answer?.ok) for (const [key, html] of Object.entries(await answer.json())) replace(key, html);
}
if (served) predict();
if (document.body.dataset.stream) setInterval(predict, 60000);
follow((key) => shown && ["timeline", "curves"].includes(key));
