"use strict";
// Times of the server are in UTC: the reader's own stands before them.
function localTimes(part) {
  for (const time of part.querySelectorAll("time")) {
    const local = new Date(time.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    time.textContent = `${local} (${time.textContent})`;
  }
}
localTimes(document);
