"use strict";
// A short guided tour, and what the page holds. Then everything is drawn for the first time.

const middle = Math.min(Math.ceil(steps.length / 2), steps.length - 1);
const firstDecode = Math.min(steps.findIndex((step) => step.start > 0 && step.phase === "decode"), steps.length - 1);

const STOPS = [
  {
    at: "text-card",
    place: { step: 0 },
    title: "Text is written token by token",
    says: () =>
      "The grey words are the prompt. The model writes one more token at each step. In step 0, the prefill, " +
      "both paths read the whole prompt: they do the same work.",
  },
  {
    at: "flow",
    place: { step: Math.max(firstDecode, 0), view: "scores" },
    title: "One row against all keys",
    says: () => {
      const { start, end } = steps[state.step];
      return (
        `From here on they part. The newest token asks a query, which is held against the keys of all ${end} ` +
        `tokens. Left: ${start} of these keys lie in the cache (blue, hatched); one query, key and value is ` +
        `new (green). Right: all ${start} are made again (orange, dashed), only to get the same last row.`
      );
    },
  },
  {
    at: "flow",
    place: { view: "pattern" },
    title: "Where the query looks",
    says: () =>
      "Softmax turns the scores into shares: how much the query takes of each token. The enlarged row " +
      "below shows whose. Point at a cell, or walk with the arrow keys, to read its numbers.",
  },
  {
    at: "grid",
    place: { step: middle },
    title: "The area is the lesson",
    says: () =>
      "Each row is a step. The cached path paints one new cell a row and reuses the rest. The naive path " +
      "paints the whole row, again and again: work that grows with the square of the text.",
  },
  {
    at: "time",
    place: { step: steps.length - 1 },
    title: "What it does to the clock",
    says: () =>
      "Each piece is as long as its step took. With the cache a step stays short; without it each step " +
      "has more to do than the one before.",
  },
  {
    at: "layers",
    place: {},
    title: "The price",
    says: () =>
      `Nothing is free: the cache holds a key and a value of every token in every layer. That is ` +
      `${bytes(steps.at(-1).cache_bytes)} now, and it grows with each token. The table says what both paths read and compute.`,
  },
];
if (facts.found) {
  STOPS.push({
    at: facts.cell ? "flow" : "check",
    place: firstWrong(),
    title: "The first wrong value",
    says: () =>
      `The paths part at ${placeName(facts.found)}. It is marked ✗ and red. What is computed from a ` +
      "wrong value is wrong as well, but the text may go wrong only later, or never.",
  });
}

let stop = -1;

function goToStop(index) {
  leaveStop();
  stop = clamp(index, STOPS.length);
  const { at: target, place, title, says } = STOPS[stop];
  pause();
  show(place);
  byId(target).classList.add("toured");
  byId("tour").hidden = false;
  byId("tour-title").textContent = title;
  byId("tour-says").textContent = says();
  byId("tour-count").textContent = `${stop + 1} of ${STOPS.length}`;
  byId("tour-back").disabled = stop === 0;
  byId("tour-next").textContent = stop === STOPS.length - 1 ? "Done" : "Next";
  byId(target).scrollIntoView({ block: "start" });
  byId("tour-title").focus({ preventScroll: true });
}

function leaveStop() {
  for (const section of document.querySelectorAll(".toured")) section.classList.remove("toured");
}

function endTour() {
  if (stop < 0) return;
  leaveStop();
  stop = -1;
  byId("tour").hidden = true;
  byId("tour-open").focus({ preventScroll: true });
}

function setTour() {
  byId("tour-open").onclick = () => goToStop(0);
  byId("tour-end").onclick = endTour;
  byId("tour-back").onclick = () => goToStop(stop - 1);
  byId("tour-next").onclick = () => (stop === STOPS.length - 1 ? endTour() : goToStop(stop + 1));
}

function sayStored() {
  const items = [
    "Nothing here is simulated. The times are those of a run in which nothing was recorded; the values are those of another run over the same tokens; a third one held every value of both paths against its twin.",
    "As float32, exactly: of the cached path, every key and value once, as made; and for each step and layer, which of them each slot of the cache held. Every query, score, share and mixed row. Of the naive path, the same for each row when it was made first.",
    "Of the rows that the naive path makes again: how far the row lies at most from what the cached path holds, for each step, layer, head and token, in one byte: 0 for equal bit for bit, else rounded up to the next of four steps per doubling. The cell that is drawn there is the one from when the row was made first.",
    "Bytes and arithmetic are computed from the shapes, as the code executes them.",
    "The page is one file: it loads nothing, and sends nothing.",
  ];
  byId("stored").replaceChildren(...items.map((text) => element("li", {}, text)));
}

setTour();
sayStored();
show(facts.found ? firstWrong() : { step: Math.max(firstDecode, 0) });
