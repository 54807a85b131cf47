"use strict";
// The page holds all it shows as tables; this adds picking, sorting, searching and a log scale.
(() => {
  document.body.classList.add("live");
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const strip = document.querySelector("svg.strip");
  const table = document.querySelector("table.collectives");
  const point = document.querySelector(".point");

  // The row, its bars in the timeline and its groups on the mesh are marked together.
  const pick = (id) => {
    all(".on").forEach((e) => e.classList.remove("on"));
    const row = id && document.getElementById(id);
    if (!row) return;
    row.classList.add("on");
    if (strip) all(`rect[data-row="${id}"]`, strip).forEach((e) => e.classList.add("on"));
    row.dataset.groups.split(" ").forEach((g) => document.getElementById(g)?.classList.add("on"));
    if (point) point.textContent = row.dataset.says;
  };
  // An open row shows its groups beside what is said of it.
  const show = (fold) => {
    const row = fold.closest("tr");
    const place = fold.querySelector(".here");
    if (!fold.open || !row || !place || place.childElementCount) return;
    for (const id of row.dataset.groups.split(" ")) {
      const drawn = document.getElementById(id);
      if (!drawn) continue;
      const copy = drawn.cloneNode(true);
      copy.removeAttribute("id");
      copy.classList.remove("on");
      place.append(copy);
    }
  };
  if (table) {
    table.addEventListener("mouseover", (e) => pick(e.target.closest("tbody tr")?.id));
    table.addEventListener("focusin", (e) => pick(e.target.closest("tbody tr")?.id));
    all("details", table).forEach((d) => d.addEventListener("toggle", () => show(d)));
  }
  for (const one of all("svg.strip")) {
    const bars = all("a, g", one);
    const told = one.closest("section").querySelector(".point");
    const show = (bar) => {
      const rect = bar?.querySelector("rect");
      if (!rect) return;
      if (rect.dataset.row) pick(rect.dataset.row);
      told.textContent = bar.getAttribute("aria-label");
    };
    // One bar at a time is a stop of the Tab key; arrow keys move along the bars that are not filtered out.
    const shown = (bar) => !bar.querySelector("rect.off");
    bars.forEach((bar, n) => bar.setAttribute("tabindex", n ? -1 : 0));
    one.addEventListener("keydown", (e) => {
      const at = bars.indexOf(e.target.closest("a, g"));
      const to = {
        ArrowRight: () => bars.slice(at + 1).find(shown),
        ArrowLeft: () => bars.slice(0, at).findLast(shown),
        Home: () => bars.find(shown),
        End: () => bars.findLast(shown),
      }[e.key]?.();
      if (at < 0 || !to) return;
      e.preventDefault();
      bars[at].setAttribute("tabindex", -1);
      to.setAttribute("tabindex", 0);
      to.focus();
    });
    one.addEventListener("mouseover", (e) => show(e.target.closest("a, g")));
    one.addEventListener("focusin", (e) => show(e.target.closest("a, g")));
    one.addEventListener("click", (e) => {
      const row = document.getElementById(e.target.closest("a, g")?.querySelector("rect").dataset.row);
      if (!row) return;
      e.preventDefault();
      if (row.hidden) return;
      row.querySelector("details").open = true;
      row.scrollIntoView({ block: "center" });
      row.querySelector("summary").focus({ preventScroll: true });
      pick(row.id);
    });
  }
  const log = document.querySelector(".tools .log");
  log?.addEventListener("change", () =>
    all("svg.strip rect").forEach((bar) => {
      const [high, other] = [bar.getAttribute("height"), bar.dataset.log];
      bar.setAttribute("y", Number(bar.getAttribute("y")) + Number(high) - Number(other));
      bar.setAttribute("height", other);
      bar.dataset.log = high;
    }),
  );
  // Of the treemap, one file as large as all.
  for (const tree of all(".tree"))
    tree.addEventListener("click", (e) => {
      const file = e.target.closest(".file");
      all(".file", tree).forEach((f) => {
        const on = f === file && f.classList.toggle("zoomed");
        if (!on) f.classList.remove("zoomed");
        f.querySelector("button").setAttribute("aria-pressed", on);
      });
    });
  // On the mesh, the members of one group.
  document.addEventListener("mouseover", (e) => {
    const cell = e.target.closest?.("[data-g]");
    const svg = e.target.closest?.("svg.mesh");
    if (svg) all(".cell", svg).forEach((c) => c.classList.toggle("on", c.dataset.g === cell?.dataset.g));
  });

  if (table) {
    const body = table.tBodies[0];
    all("thead button", table).forEach((button) => {
      button.addEventListener("click", () => {
        const head = button.closest("th");
        const column = head.cellIndex;
        const down = head.getAttribute("aria-sort") !== "descending";
        all("th", table.tHead).forEach((th) => th.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
        const numbers = head.classList.contains("n");
        const order = (a, b) =>
          numbers ? Number(key(b)) - Number(key(a)) : -key(a).localeCompare(key(b));
        body.append(...[...body.rows].sort((a, b) => (down ? 1 : -1) * order(a, b)));
      });
    });
    const box = document.querySelector(".tools input[type=search]");
    const told = document.querySelector(".tools output");
    const verdicts = all(".tools .verdict");
    const filter = () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      const wanted = new Set(verdicts.filter((v) => v.checked).map((v) => v.value));
      let shown = 0;
      for (const row of body.rows) {
        // What the row says, and in its fold the names of instructions, groups and places.
        const text = [row.dataset.says, ...all("code", row).map((c) => c.textContent)].join(" ").toLowerCase();
        row.hidden = !wanted.has(row.dataset.verdict) || !words.every((w) => text.includes(w));
        shown += !row.hidden;
        if (strip) {
          all(`rect[data-row="${row.id}"]`, strip).forEach((bar) =>
            bar.classList.toggle("off", row.hidden),
          );
        }
      }
      told.textContent = shown < body.rows.length ? `${shown} of ${body.rows.length} rows` : "";
    };
    box.addEventListener("input", filter);
    verdicts.forEach((v) => v.addEventListener("change", filter));
    document.querySelector(".unfold").addEventListener("click", (e) => {
      const open = all("details", body).some((d) => !d.open);
      all("details", body).forEach((d) => (d.open = open));
      e.target.textContent = open ? "Fold all" : "Unfold all";
    });
  }
})();
