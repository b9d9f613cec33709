"use strict";
// The newest row, enlarged: what the newest query makes of every key, on both paths.

function paintRow(both, [low, high]) {
  const canvas = byId("row");
  const { step, layer, head, view } = state;
  const last = steps[step].end - 1;
  const name = view === "scores" ? "scores" : "pattern";
  const most = both.cached.most;
  const room = canvas.parentElement.clientWidth - 1;
  const label = room > 600 ? 62 : 0;
  const wide = Math.min((room - label) / most, 46);
  const words = wide >= 11 ? 74 : 0; // room for the tokens' texts
  const thick = 30;
  const tops = { cached: words + 14, naive: words + 14 + thick + 22 };
  const pen = prepare(canvas, label + wide * most + 1, tops.naive + thick + 24);
  const scale = scaleOf(name, low, high);
  drawn.row = [];
  for (const path of ["cached", "naive"]) {
    const columns = columnsOf(path, step);
    const top = tops[path];
    const box = {
      name, path, x: label, y: top, rows: 1, columns, cell: wide, first: last,
      width: wide * columns, height: thick,
    };
    drawn.row.push(box);
    if (label) write(pen, path, 0, top + thick / 2, { bold: true, ink: path === "cached" ? "cache" : "again" });
    for (let column = 0; column < columns; column++) {
      const x = label + column * wide;
      const why = hiddenWhy(path, step, layer, head, last, column);
      if (why) {
        hatch(pen, x, top, wide, thick, why === "future" ? "cross" : "dots", colour("hidden"), why === "future" ? 8 : 4, 0.9);
        continue;
      }
      const number = numberAt(path, name, step, layer, head, last, column);
      pen.fillStyle = css(shade(originOf(path, step, column), scale(number)));
      pen.fillRect(x, top, wide - (wide > 6 ? 1 : 0), thick);
    }
    for (const [origin, first, length] of runsOf(path, step, 0, columns)) {
      markOrigin(pen, origin, label + first * wide, top, length * wide, thick);
    }
  }
  const tokens = steps[step].end;
  for (let token = 0; token < tokens; token++) {
    const x = label + (token + 0.5) * wide;
    const wrong = isWrongPair(token);
    write(pen, wrong ? "✗" : wide >= 9 ? "=" : "", x, tops.cached + thick + 11, {
      ink: wrong ? "wrong" : "quiet", align: "center", bold: wrong,
    });
    if (words) {
      pen.save();
      pen.translate(x, words + 8);
      pen.rotate(-Math.PI / 2);
      const text = quoted(facts.tokens[token]);
      write(pen, text.length > 10 ? `${text.slice(0, 9)}…` : text, 0, 0, { ink: token === last ? "new" : "ink", bold: token === last });
      pen.restore();
    }
  }
  for (let token = 0; token < tokens; token += wide < 6 ? 20 : 10) {
    write(pen, String(token), label + (token + 0.5) * wide, tops.naive + thick + 12, { ink: "quiet", align: token ? "center" : "left" });
  }
  if (label) write(pen, "position", 0, tops.naive + thick + 12, { ink: "quiet" });
  keepBare("row");
}

// Whether the newest query's score for a token differs by more than rounding between the paths.
function isWrongPair(token) {
  const { step, layer, head } = state;
  const last = steps[step].end - 1;
  const name = state.view === "scores" ? "scores" : "pattern";
  const slot = slotOf[token];
  const naive = numberAt("naive", name, step, layer, head, last, token);
  if (slot >= steps[step].slots) return true;
  const cached = numberAt("cached", name, step, layer, head, last, slot);
  const limit = apartLimit(limitAt(step, layer, name));
  return !(cached === naive || Math.abs(cached - naive) <= limit);
}

function fillRowTable() {
  const { step, layer, head } = state;
  const last = steps[step].end - 1;
  const headRow = element("tr", {});
  for (const text of ["key", "position", "cached path", "score", "share", "naive path", "score", "share"]) {
    headRow.append(element("th", { scope: "col" }, text));
  }
  const rows = [];
  for (let token = 0; token <= last; token++) {
    const slot = slotOf[token];
    const cells = [quoted(facts.tokens[token]), String(token)];
    for (const [path, place] of [["cached", slot], ["naive", token]]) {
      if (place >= columnsOf(path, step)) cells.push("missing", "", "");
      else {
        const why = hiddenWhy(path, step, layer, head, last, place);
        const get = (name) => short(numberAt(path, name, step, layer, head, last, place));
        cells.push(ORIGINS[originOf(path, step, place)]);
        cells.push(...(why ? ["hidden", hiddenWords(why)] : [get("scores"), get("pattern")]));
      }
    }
    const row = element("tr", {});
    cells.forEach((text, place) => row.append(element(place ? "td" : "th", place ? {} : { scope: "row" }, text)));
    rows.push(row);
  }
  byId("row-table").replaceChildren(element("thead", {}, headRow), element("tbody", {}, ...rows));
}

const hiddenWords = (why) => (why === "future" ? "later than the query" : "before the window");
