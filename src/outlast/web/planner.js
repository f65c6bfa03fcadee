"use strict";
// Sliders and texts ask the server; one request is open at a time, the newest values come next.
const form = document.getElementById("plan");
const live = document.getElementById("live");
const ranges = [...form.querySelectorAll("[type=range]")];
const given = () => new URLSearchParams(
  [...new FormData(form)].filter(([, text]) => text.trim()));
let isOpen = false;
let isChanged = false;
async function ask(part, query) {
  const response = await fetch(`/plan/${part}?${query}`);
  document.getElementById(part).innerHTML = await response.text();
  localTimes(document.getElementById(part));
  return response.ok;
}
let simulation = null; // of the band, which comes behind the curves; a move of a slider ends it
async function simulate(query) {
  const own = simulation = new AbortController();
  try {
    const response = await fetch(`/plan/band?${query}`, { signal: own.signal });
    const html = await response.text();
    if (own !== simulation || response.status !== 200) return;
    const curves = document.getElementById("curves"), open = curves.querySelector("details")?.open;
    curves.innerHTML = html;
    curves.querySelector("details").open = open;
  } catch { /* aborted, or no server: the curves stay */ }
}
async function answer() {
  isChanged = true;
  simulation?.abort();
  simulation = null;
  if (isOpen) return;
  isOpen = true;
  while (isChanged) {
    isChanged = false;
    const query = given();
    history.replaceState(null, "", `/plan?${query}`);
    try {
      if (await ask("answer", query) && !isChanged && await ask("curves", query) && !isChanged) simulate(query);
      live.textContent = "";
    } catch { live.textContent = "the server of this page does not answer"; }
  }
  isOpen = false;
}
for (const range of ranges) {
  const stops = range.dataset.stops.split(" ");
  const field = document.getElementById(range.dataset.of);
  range.hidden = false;
  range.addEventListener("input", () => {
    field.value = stops[range.value];
    range.setAttribute("aria-valuetext", field.value);
    answer();
  });
  field.addEventListener("input", () => {
    const at = stops.indexOf(field.value.trim());
    if (at >= 0) range.value = at;
    range.setAttribute("aria-valuetext", field.value);
  });
}
form.addEventListener("input", (event) => { if (event.target.name) answer(); });
if (document.querySelector("#curves svg")) simulate(given());
