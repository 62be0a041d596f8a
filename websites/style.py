"""The style sheet that all pages carry. A backslash at the end of a line joins two lines."""

STYLE = """
*{box-sizing:border-box}body{margin:0;font:15px/1.45 "Liberation Sans",Arial,sans-serif;\
color:#1f2430;background:#f5f6f8}
a{color:var(--c);text-decoration:none}a:hover{text-decoration:underline}h1{font-size:24px;\
margin:0 0 12px}h2{font-size:18px;margin:18px 0 8px}
p{margin:6px 0}main{max-width:1080px;margin:0 auto;padding:18px 20px 40px}.cols{display:grid;\
grid-template-columns:1fr 280px;gap:22px}
header.top{background:var(--top);color:#fff;padding:10px 22px}
header.top .bar{max-width:1080px;margin:0 auto;display:flex;gap:18px;align-items:center}\
header.top a{color:#fff}
header.top .brand{font-weight:700;font-size:20px;letter-spacing:.2px}\
header.top nav{margin-left:auto;display:flex;gap:16px}
header.top form{display:flex;gap:6px;flex:1;max-width:430px}
input,select,textarea{font:inherit;padding:6px 9px;border:1px solid #c6ccd6;border-radius:6px;\
background:#fff;color:inherit;width:100%}
nav.sub{background:#fff;border-bottom:1px solid #e3e6ec}nav.sub div{max-width:1080px;\
margin:0 auto;padding:9px 20px;display:flex;gap:20px}
.grid{display:grid;grid-template-columns:repeat(4,1fr);gap:16px}
.card{background:#fff;border:1px solid #e3e6ec;border-radius:10px;padding:14px;display:block;\
box-shadow:0 1px 2px #0000000a}
.card h2,.card h3{margin:8px 0 2px;font-size:15px}.card svg{width:100%;border-radius:8px;\
display:block}
button{font:inherit;padding:6px 13px;border:1px solid var(--c);border-radius:6px;\
background:var(--c);color:#fff;cursor:pointer}
button.plain{background:#fff;color:var(--c)}button.danger{background:#fff;color:#b3261e;\
border-color:#d9a09c}
form.inline{display:inline-block;margin-right:6px}.field{display:block;margin:10px 0;\
max-width:520px}
.field span{display:block;font-size:13px;color:#566;margin-bottom:3px}
table{width:100%;border-collapse:collapse;background:#fff;border:1px solid #e3e6ec;\
border-radius:8px}
th,td{text-align:left;padding:8px 11px;border-bottom:1px solid #eceff3;vertical-align:top}\
th{font-size:13px;color:#566;background:#fafbfc}
.price{font-weight:700}.muted{color:#697386;font-size:13px}
.tag{display:inline-block;padding:1px 9px;border-radius:10px;font-size:12.5px;background:#e8edf6;\
color:#33415c;margin-right:4px}
.good{background:#dff3e4;color:#17603a}.warn{background:#fdf0d5;color:#7a4d05}\
.bad{background:#fbe1df;color:#8c1d18}
.box{background:#fff;border:1px solid #e3e6ec;border-radius:10px;padding:14px 18px;\
margin-bottom:14px}.stars{color:#d98a00;letter-spacing:1px}
.pager{display:flex;gap:14px;margin-top:12px}
.hero{border-radius:12px;padding:26px 30px;color:#fff;margin-bottom:18px;\
background:linear-gradient(110deg,var(--top),var(--c))}
.hero h1{margin:0 0 4px}.box h2:first-child{margin-top:2px}\
header.top button{border-color:#ffffff55}
.stat{font-size:26px;font-weight:700;display:block}.post{display:flex;gap:14px}\
.post .votes{min-width:58px;text-align:center}
.post h3{margin:0;font-size:16px}.side nav{display:flex;flex-direction:column;gap:2px}
.shell{display:grid;grid-template-columns:200px 1fr;min-height:100vh}\
.shell aside{background:var(--top);padding:16px 14px}
.shell aside a{display:block;color:#d9dee8;padding:7px 10px;border-radius:6px}
.shell aside .brand{color:#fff;font-weight:700;font-size:18px;margin-bottom:10px}\
.shell main{margin:0;max-width:1080px}
.shop{--c:#0b6e5f;--top:#0f3d3a}.forum{--c:#3f57c9;--top:#262b54}.code{--c:#b4481e;--top:#2b2430}\
.admin{--c:#9a4d07;--top:#33302c}
"""
