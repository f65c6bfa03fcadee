"use strict";
// Controls ask the server for a report, whose sections appear as they arrive.
const form = document.getElementById("lake");
const report = document.getElementById("report");
const live = document.getElementById("live");
let running = null;
async function refresh() {
  running?.abort();
  const own = running = new AbortController();
  const query = new URLSearchParams([...new FormData(form)].filter(([, text]) => text.trim()));
  history.replaceState(null, "", `/?${query}`);
  for (const link of document.querySelectorAll("a[data-path]")) link.href = `${link.dataset.path}?${query}`;
  live.textContent = "computing";
  try {
    const response = await fetch(`/report?${query}`, { signal: own.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let html = "";
    for (let next = await reader.read(); !next.done; next = await reader.read()) {
      html += next.value;
      if (own === running) report.innerHTML = html;
    }
    if (own === running) live.textContent = "";
  } catch {
    if (own === running) live.textContent = "the server of this page does not answer";
  }
}
if (form) form.addEventListener("change", (event) => { if (event.target.name !== "node") refresh(); });
