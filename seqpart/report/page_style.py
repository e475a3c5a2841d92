"""How the page looks: light or dark as the reader's system is, and in one column on a phone."""

STYLE = """
:root{color-scheme:light dark;--page:#f9f9f7;--card:#fff;--ink:#0b0b0b;--soft:#52514e;--line:#e4e3df;--s1:#2a78d6;--s2:#c2570c;
--s3:#0f8a63;--s4:#7a5cc7;--s5:#a8326e;--s6:#7a6a00;--test:#0b0b0b;--limit:#c4232b;--predicted:#6b6a66}
@media(prefers-color-scheme:dark){:root{--page:#121211;--card:#1c1c1a;--ink:#f5f4f0;--soft:#b4b2aa;--line:#35342f;--s1:#5aa2f5;
--s2:#f0924a;--s3:#3cc795;--s4:#ab94f0;--s5:#ea79b0;--s6:#d3bf45;--test:#fff;--limit:#ff6b6b;--predicted:#a3a199}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:960px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:8px 0 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 8px}
p{margin:8px 0;color:var(--soft);overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin:16px 0}
.missing{border-left:4px solid var(--limit)}
.state{margin:0}
ul{margin:8px 0;padding-left:20px;color:var(--soft);overflow-wrap:anywhere}
.tiles,.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:8px 12px}
.tiles li{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 14px;
flex:1 1 130px;font-size:.85rem}
.tiles b{display:block;font-size:1.1rem;color:var(--ink)}
figure{margin:0 0 24px}
figcaption{font-weight:600}
.legend{font-size:.85rem;margin:4px 0 12px}
.legend li:empty{display:none}
.legend li::before{content:"";display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;
vertical-align:middle;background:var(--c)}
.legend .test::before{width:8px;height:8px;border-radius:50%}
.plot{position:relative;height:240px;margin:12px 12px 32px 76px;font-size:.75rem;color:var(--soft)}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot span{position:absolute;white-space:nowrap}
.y{right:calc(100% + 8px);transform:translateY(50%)}
.x{top:calc(100% + 6px);transform:translateX(-50%)}
path{fill:none;stroke:var(--c);vector-effect:non-scaling-stroke}
.line{stroke-width:2;stroke-linejoin:round}
.dots{stroke-width:8;stroke-linecap:round}
.grid,.mark{stroke:var(--line);stroke-width:1}
.mark{stroke:var(--soft);stroke-dasharray:2 4}
.level{stroke-width:2;stroke-dasharray:8 5}
.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}.s5{--c:var(--s5)}.s6{--c:var(--s6)}
.test{--c:var(--test)}.limit{--c:var(--limit)}.predicted{--c:var(--predicted)}
.bar{display:grid;grid-template-columns:minmax(110px,2fr) 3fr minmax(110px,2fr);gap:10px;align-items:center;margin:8px 0;
font-size:.85rem}
.bar i{height:14px;background:var(--line);border-radius:4px;overflow:hidden}
.bar b{display:block;height:100%;background:var(--s1);border-radius:4px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
.pairs td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.pairs td:first-child{color:var(--soft);min-width:9em}
summary{cursor:pointer;padding:4px 0}
@media(max-width:560px){main{padding:10px}section{padding:12px}.plot{margin-left:64px;height:200px}
.bar{grid-template-columns:1fr 1fr}.bar span:last-child{grid-column:1/-1;color:var(--soft)}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
