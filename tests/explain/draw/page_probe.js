// Looks at a page as a reader would: what sticks out, what overlaps, what is hard to
// read. Gives a list of sentences, which is empty for a good page.
function probe(doc) {
  const view = doc.defaultView;
  const style = (element, pseudo) => view.getComputedStyle(element, pseudo);
  const ancestors = (element) => {
    const found = [];
    for (let e = element; e && e !== doc; e = e.parentElement) found.push(e);
    return found;
  };
  const scrolls = (element) => ["auto", "scroll"].includes(style(element).overflowX);
  // Text that only screen readers get.
  const isClipped = (element) =>
    ancestors(element).some((e) => style(e).clipPath !== "none");
  const name = (element) =>
    `${element.tagName.toLowerCase()}.${element.getAttribute("class") || ""}`;

  const findings = [];
  const root = doc.documentElement;
  const height = root.scrollHeight;
  // What is folded is looked at unfolded.
  for (const folded of doc.querySelectorAll("details")) folded.open = true;
  if (root.scrollWidth > root.clientWidth)
    findings.push(`the page is ${root.scrollWidth} wide, there are ${root.clientWidth}`);

  for (const element of doc.body.querySelectorAll("*")) {
    if (isClipped(element) || ["STYLE", "title"].includes(element.tagName)) continue;
    const isBlock = style(element).display !== "inline";
    if (isBlock && !scrolls(element) && element.scrollWidth > element.clientWidth + 1)
      findings.push(`what is in ${name(element)} sticks out of it`);
    const parent = element.parentElement;
    if (ancestors(parent).some(scrolls)) continue;
    const inner = element.getBoundingClientRect();
    const outer = parent.getBoundingClientRect();
    if (inner.left < outer.left - 1 || inner.right > outer.right + 1)
      findings.push(`${name(element)} sticks out of ${name(parent)}`);
  }

  const texts = [];
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || isClipped(parent)) continue;
    if (["STYLE", "title"].includes(parent.tagName)) continue;
    const range = doc.createRange();
    range.selectNodeContents(node);
    const windows = ancestors(parent).filter(scrolls);
    for (const rect of range.getClientRects()) {
      let [left, right] = [rect.left, rect.right];
      for (const each of windows.map((e) => e.getBoundingClientRect()))
        [left, right] = [Math.max(left, each.left), Math.min(right, each.right)];
      if (right > left && rect.height)
        texts.push({ node, left, right, top: rect.top, bottom: rect.bottom });
    }
  }
  for (const [number, a] of texts.entries())
    for (const b of texts.slice(number + 1))
      if (a.node !== b.node) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 1)
          findings.push(`'${a.node.data}' and '${b.node.data}' overlap`);
      }

  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = numbers(colour)
      .slice(0, 3)
      .map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const background = (element) => {
    for (const e of ancestors(element)) {
      const colour = style(e).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let least = Infinity;
  const check = (element, colour) => {
    const ratio = contrast(colour, background(element));
    least = Math.min(least, ratio);
    if (ratio < 4.5) findings.push(`a contrast of ${ratio.toFixed(2)}: ${name(element)}`);
  };
  for (const element of new Set(texts.map((text) => text.node.parentElement)))
    check(element, style(element).color);
  for (const element of doc.body.querySelectorAll("*"))
    if (!["none", "normal"].includes(style(element, "::before").content))
      check(element, style(element, "::before").color);

  return {
    height,
    findings: [...new Set(findings)].slice(0, 300),
    texts: texts.length,
    contrast: least,
    back: style(doc.body).backgroundColor,
    width: view.innerWidth,
  };
}
