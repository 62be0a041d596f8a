"""The shop's back office: orders, products, customers, reviews and reports.

It has no tables of its own: it works on those of the shop.
"""

from websites.shop import MONTHS, STATES, TOTAL, lines_table, state_tag
from websites.site import (
    Site, button, choose, esc, field, form, link, links, money, pager, table,
)

PAGE_SIZE = 12  # rows of a table
REVIEWS_PAGE_SIZE = 8
OPEN_STATES = STATES[:2]  # orders that can still be shipped or canceled
YEARS = (2024, 2025)


# ---- pieces of pages ----


def frame(request, title, body):
    menu = "".join([
        link("/", "Dashboard"), link("/orders", "Orders"), link("/products", "Products"),
        link("/customers", "Customers"), link("/reviews", "Reviews"),
        link("/reports/sales", "Sales report"), link("/reports/bestsellers", "Bestsellers"),
    ])
    return (
        '<div class="shell"><aside><div class="brand">Harbour Admin</div>'
        f'<nav aria-label="Menu">{menu}</nav></aside><main>{body}</main></div>'
    )


def fill(db, rng):
    """Nothing to fill: the shop fills the tables."""


SITE = Site("admin", "Harbour Admin", "", fill, frame)


def find_form(request, path, label):
    """A search field whose text comes back as ?q=TEXT."""
    words = esc(request.query.get("q", ""))
    return (
        f'<form action="{path}" class="inline">'
        f'<input type="search" name="q" aria-label="{label}" value="{words}" '
        'style="width:300px"> <button>Find</button></form>'
    )


def order_table(request, where, values, size):
    """A table of the orders that meet the SQL condition `where`, the newest first."""
    orders = request.page_of(
        f"select number,date,name,state,{TOTAL} "
        f"from orders join customer on customer.id=customer where {where} order by number desc",
        size, *values)
    rows = [
        [link(f"/orders/{number}", f"#{number}"), date, esc(name), state_tag(state), money(total)]
        for number, date, name, state, total in orders
    ]
    return table(["Order", "Date", "Customer", "Status", "Total"], rows)


def bars(request):
    """A chart of the sales by month, for a person's eyes: the sales report has the numbers."""
    sums = dict(request.rows(
        f"select substr(date,6,2),sum({TOTAL}) from orders "
        "where state!='Canceled' and date like '2025%' group by 1"
    ))
    most = max(sums.values(), default=1)
    columns = ""
    for index, name in enumerate(MONTHS):
        height = 110 * sums.get(f"{index + 1:02}", 0) / most
        columns += (
            f'<rect x="{20 + 70 * index}" y="{120 - height:.0f}" width="44" '
            f'height="{height:.0f}" rx="4" fill="#c9762b"/>'
            f'<text x="{42 + 70 * index}" y="138" font-size="12" text-anchor="middle" '
            f'fill="#697386">{name[:3]}</text>'
        )
    return (
        '<div class="card"><svg viewBox="0 0 860 144" aria-hidden="true">'
        f'{columns}</svg></div>'
    )


# ---- the dashboard ----


@SITE.get("/")
def dashboard(request):
    sales = request.value(f"select sum({TOTAL}) from orders where state!='Canceled'")
    stats = [
        ("Sales", money(sales)),
        ("Orders", request.value("select count(*) from orders")),
        ("Pending orders", request.value("select count(*) from orders where state='Pending'")),
        ("Customers", request.value("select count(*) from customer")),
    ]
    cards = "".join(
        f'<div class="card"><span class="stat">{value}</span>{name}</div>' for name, value in stats)
    return "Dashboard", (
        f'<h1>Dashboard</h1><div class="grid">{cards}</div>'
        f'<h2>Sales by month, 2025</h2>{bars(request)}'
        f'<h2>Last orders</h2>{order_table(request, "1", [], 6)}'
    )


# ---- orders ----


@SITE.get("/orders")
def orders(request):
    # The SQL condition of the filters in the query.
    where = "1"
    values = []
    if request.query.get("status") in STATES:
        where = "state=?"
        values.append(request.query["status"])
    if request.query.get("q"):
        where += " and instr(lower(number||' '||name), lower(?))"
        values.append(request.query["q"].lstrip("#"))
    count = request.value(
        f"select count(*) from orders join customer on customer.id=customer where {where}", *values)
    states = links("/orders", "status", dict(zip(STATES, STATES)))
    return "Orders", (
        f'<h1>Orders</h1>{find_form(request, "/orders", "Find orders")}'
        f'<p class="pager"><span>Status:</span> {states}</p><p>{count} orders</p>'
        f'{order_table(request, where, values, PAGE_SIZE)}{pager(request, count, PAGE_SIZE)}'
    )


@SITE.get(r"/orders/(\d{9})")
def order(request, number):
    order_id, date, state, shipping, address, tracking, note, name, email, total = request.row(
        f"select orders.id,date,state,shipping,address,tracking,note,name,email,{TOTAL} "
        "from orders join customer on customer.id=customer where number=?", number)
    lines = lines_table(request, order_id, lambda product, name: esc(name))
    cancel_button = ship_form = ""
    if state in OPEN_STATES:
        cancel_button = button(f"/orders/{number}/cancel", "Cancel order", kind="danger")
        ship_form = form(
            f"/orders/{number}/ship", "Ship order", field("tracking", "Tracking number"))
    note_form = form(
        f"/orders/{number}/note", "Save note", field("note", "Note to the order", note))
    return f"Order #{number}", (
        f'<h1>Order #{number}</h1><div class="cols"><div><div id="facts"><p>{state_tag(state)} '
        f'<span class="muted">{date}, {esc(shipping)} shipping</span></p>'
        f'<p>{esc(name)}, {esc(email)}</p><p>To {esc(address)}</p>'
        f'<p>Tracking number: {esc(tracking) or "none"}</p>'
        f'<p id="note">Note: {esc(note) or "none"}</p></div>'
        f'{lines}<p class="price">Total {money(total)}</p></div>'
        f'<div class="box">{cancel_button}{ship_form}{note_form}</div></div>'
    )


@SITE.post(r"/orders/(\d{9})/cancel")
def order_cancel(request, number):
    request.change(
        "update orders set state='Canceled' where number=? and state in ('Pending','Processing')",
        number)
    return f"/orders/{number}"


@SITE.post(r"/orders/(\d{9})/ship")
def order_ship(request, number):
    tracking = request.text("tracking", 60)
    if tracking:
        request.change(
            "update orders set state='Complete', tracking=? "
            "where number=? and state in ('Pending','Processing')",
            tracking, number)
    return f"/orders/{number}"


@SITE.post(r"/orders/(\d{9})/note")
def order_note(request, number):
    request.change("update orders set note=? where number=?", request.text("note", 300), number)
    return f"/orders/{number}"


# ---- products ----


@SITE.get("/products")
def products(request):
    text = request.query.get("q", "")
    sorts = {"stock": "stock, id", "price": "price"}
    order = sorts.get(request.query.get("sort"), "id")
    where = "instr(lower(name||' '||sku||' '||category), lower(?))"
    count = request.value(f"select count(*) from product where {where}", text)
    found = request.page_of(
        f"select id,sku,name,category,price,stock,enabled from product where {where} "
        f"order by {order}", PAGE_SIZE, text)
    rows = []
    for product_id, sku, name, category, price, stock, enabled in found:
        kind, word = ("good", "enabled") if enabled else ("bad", "disabled")
        status = f'<span class="tag {kind}">{word}</span>'
        name_link = link(f"/products/{product_id}", name)
        rows.append([sku, name_link, category, money(price), str(stock), status])
    sorted_links = links(
        "/products", "sort", {"Lowest stock first": "stock", "Cheapest first": "price"})
    return "Products", (
        f'<h1>Products</h1>{find_form(request, "/products", "Find products")}'
        f'<p class="pager"><span>Sort:</span> {sorted_links}</p><p>{count} products</p>'
        f'{table(["SKU", "Name", "Category", "Price", "Stock", "Status"], rows)}'
        f'{pager(request, count, PAGE_SIZE)}'
    )


@SITE.get(r"/products/(\d{1,9})")
def product(request, number):
    product_id, sku, name, price, stock, enabled = request.row(
        "select id,sku,name,price,stock,enabled from product where id=?", int(number))
    product_form = form(
        f"/products/{product_id}", "Save product", field("name", "Name", name),
        field("price", "Price in dollars", f"{price / 100:.2f}"), field("stock", "Stock", stock),
        choose("enabled", "Status", [("1", "enabled"), ("0", "disabled")], enabled))
    return name, (
        f'<h1>{esc(name)}</h1><p class="muted">{sku}</p><div class="box" id="facts">'
        f'<p>Price {money(price)}</p><p>Stock {stock}</p>'
        f'<p>Status {"enabled" if enabled else "disabled"}</p></div>{product_form}'
    )


@SITE.post(r"/products/(\d{1,9})")
def product_save(request, number):
    name, price, stock, enabled = request.row(
        "select name,price,stock,enabled from product where id=?", int(number))
    # What the form leaves out, or what is no number, stays as it is.
    text = request.text("price", 12).lstrip("$")
    if text.replace(".", "", 1).isdecimal() and text.isascii():
        price = round(float(text) * 100)
    name = request.text("name", 120) or name
    stock = request.number("stock", stock)
    enabled = request.number("enabled", enabled, 1)
    request.change("update product set name=?,price=?,stock=?,enabled=? where id=?",
                   name, price, stock, enabled, int(number))
    return f"/products/{int(number)}"


# ---- customers ----


@SITE.get("/customers")
def customers(request):
    text = request.query.get("q", "")
    where = "instr(lower(name||' '||email), lower(?))"
    count = request.value(f"select count(*) from customer where {where}", text)
    found = request.page_of(
        "select name,email,city,phone,(select count(*) from orders where customer=customer.id) "
        f"from customer where {where} order by name", PAGE_SIZE, text)
    rows = [
        [esc(name), esc(email), esc(city), esc(phone), str(num_orders)]
        for name, email, city, phone, num_orders in found
    ]
    return "Customers", (
        f'<h1>Customers</h1>{find_form(request, "/customers", "Find customers")}'
        f'{table(["Name", "E-mail", "City", "Telephone", "Orders"], rows)}'
        f'{pager(request, count, PAGE_SIZE)}'
    )


# ---- reviews ----


@SITE.get("/reviews")
def reviews(request):
    state = "Approved" if request.query.get("status") == "Approved" else "Pending"
    count = request.value("select count(*) from review where state=?", state)
    found = request.page_of(
        "select review.id,name,author,stars,title,body from review "
        "join product on product.id=product where state=? order by review.id",
        REVIEWS_PAGE_SIZE, state)
    rows = []
    for review_id, product, author, stars, title, body in found:
        path = f"/reviews/{review_id}"
        buttons = ""
        if state == "Pending":
            buttons += button(f"{path}/approve", "Approve", f"Approve the review by {author}")
        buttons += button(f"{path}/delete", "Delete", f"Delete the review by {author}", "danger")
        text = f"<b>{esc(title)}</b><br>{esc(body)}"
        rows.append([esc(product), esc(author), str(stars), text, buttons])
    tabs = links(
        "/reviews", "status", {"Pending reviews": "Pending", "Approved reviews": "Approved"})
    return "Reviews", (
        f'<h1>Reviews</h1><p class="pager">{tabs}</p><p>{count} {state.lower()} reviews</p>'
        f'{table(["Product", "Author", "Stars", "Review", ""], rows)}'
        f'{pager(request, count, REVIEWS_PAGE_SIZE)}'
    )


@SITE.post(r"/reviews/(\d{1,9})/approve")
def review_approve(request, number):
    request.change("update review set state='Approved' where id=?", int(number))
    return "/reviews"


@SITE.post(r"/reviews/(\d{1,9})/delete")
def review_delete(request, number):
    request.change("delete from review where id=?", int(number))
    return "/reviews"


# ---- reports ----


def year_links(path):
    years = links(path, "year", {f"Year {year}": year for year in YEARS})
    return f'<p class="pager">{years}</p>'


def year_of(request):
    """The year in ?year=YEAR, 2025 by default."""
    year = request.query.get("year")
    return year if year in map(str, YEARS) else "2025"


@SITE.get("/reports/sales")
def sales(request):
    year = year_of(request)
    by_month = {
        int(month): (count, total)
        for month, count, total in request.rows(
            f"select substr(date,6,2),count(*),sum({TOTAL}) from orders "
            "where state!='Canceled' and date like ? group by 1",
            year + "%")
    }
    rows = []
    for month, name in enumerate(MONTHS, 1):
        count, total = by_month.get(month, (0, 0))
        rows.append([name, str(count), money(total)])
    return "Sales report", (
        f'<h1>Sales report {year}</h1><p class="muted">Canceled orders are left out.</p>'
        f'{year_links("/reports/sales")}{table(["Month", "Orders", "Sales"], rows)}'
    )


@SITE.get("/reports/bestsellers")
def bestsellers(request):
    year = year_of(request)
    found = request.rows(
        "select line.name,sum(amount),sum(price*amount) "
        "from line join orders on orders.id=orders where state!='Canceled' and date like ? "
        "group by product order by 2 desc, 3 desc limit 10",
        year + "%")
    rows = [
        [str(rank), esc(name), str(amount), money(total)]
        for rank, (name, amount, total) in enumerate(found, 1)
    ]
    return "Bestsellers", (
        f'<h1>Bestsellers {year}</h1>'
        '<p class="muted">By the number sold; where it is the same, by sales.</p>'
        f'{year_links("/reports/bestsellers")}'
        f'{table(["Rank", "Product", "Sold", "Sales"], rows)}'
    )
