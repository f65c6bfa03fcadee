"use strict";
// A live page: the server sends the parts that have changed, as escaped HTML.
const live = document.getElementById("live");
function replace(key, html) {
  const part = document.querySelector(`[data-part="${key}"]`);
  const open = [...part.querySelectorAll("details[open]")].map((one) => one.id);
  part.innerHTML = html;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  localTimes(part);
}
function follow(isFixed) { // `isFixed`: whether a part stays as it is
  if (!document.body.dataset.stream) return;
  const source = new EventSource(document.body.dataset.stream);
  source.onmessage = (message) => {
    const { parts, status } = JSON.parse(message.data);
    for (const [key, html] of Object.entries(parts)) if (!isFixed(key)) replace(key, html);
    live.textContent = status;
  };
  source.addEventListener("end", (message) => { live.textContent = message.data; source.close(); });
  source.onerror = () => { live.textContent = "the server of this page does not answer; the page is as of then"; };
}
